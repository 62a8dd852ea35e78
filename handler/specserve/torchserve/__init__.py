"""The only package that knows TorchServe."""
