"""The HTTP gateway: the OpenAI API in front of a `twofold.serving.controller.service.Service`."""
