"""From HTTP requests to rounds and back: OpenAI's objects, the scheduler, TorchServe's protocol."""
