"""A client of a gateway with a service that gives scripted answers."""

from support.running_gateway import running_app
from support.scripted_service import EOS, ScriptedService, served_model
from support.tokenizers_for_tests import tool_caller
from twofold.serving.gateway.app import GatewaySettings, create_app
from twofold.serving.gateway.keys import ApiKey, KeyRing


def ids_of(text):
    return tool_caller().backend.encode(text, add_special_tokens=False).ids


class Asked:
    """Base of a context with a `client`, which `connect` returns, and the prompts that the service gets."""

    def __init__(self, text, ends=(EOS,)):
        self.service = ScriptedService(lambda _: [*ids_of(text), *ends], model=served_model(max_model_len=4096))

    def __enter__(self):
        keys = KeyRing([ApiKey("me", "secret"), ApiKey("you", "other")])
        self._app = running_app(create_app(self.service, tool_caller(), GatewaySettings(keys=keys)))
        self.client = self.connect(self._app.__enter__())
        return self

    def __exit__(self, *error):
        self.client.close()
        return self._app.__exit__(*error)

    @property
    def prompt(self):
        return tool_caller().decode(self.service.started[-1].prompt_token_ids, skip_special_tokens=False)
