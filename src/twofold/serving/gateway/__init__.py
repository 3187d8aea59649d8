"""The HTTP gateway: the OpenAI API in front of a `Service`."""
