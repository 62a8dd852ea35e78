"""OpenAI's HTTP surface: requests, responses, streams, chat templates."""
