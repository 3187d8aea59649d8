"""The ids that end an output."""


def eos_token_ids(*given: object) -> tuple[int, ...]:
    """Those of the first that names any: generation_config.json's go before config.json's, as in transformers."""
    for each in given:
        if isinstance(each, int):
            return (each,)
        if isinstance(each, (list, tuple)):
            return tuple(int(token) for token in each)
    return ()
