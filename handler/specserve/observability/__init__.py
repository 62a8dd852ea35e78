"""What operators see: records of rounds and sequences, metrics, traces, the control group and v1/speculation."""
