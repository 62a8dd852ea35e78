"""What operators see: records of rounds and sequences, metrics, traces and the control group."""
