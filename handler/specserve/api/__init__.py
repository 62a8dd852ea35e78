"""OpenAI's, Anthropic's and llama.cpp's HTTP protocols: requests in, answers out."""
