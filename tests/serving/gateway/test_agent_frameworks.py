"""Agent frameworks as clients: LangChain, and loops of OpenAI's Agents SDK with two tools."""

import asyncio
from contextlib import contextmanager

import openai
import pydantic
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

import agents
from support.running_gateway import running_app
from support.scripted_service import EOS, ScriptedService, served_model
from support.tokenizers_for_tests import tool_caller
from twofold.serving.gateway.app import GatewaySettings, create_app


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TURNS = [call("get_weather", '{"city": "Rome"}'), call("get_time", '{"city": "Rome"}'), "Sunny at noon."]


@contextmanager
def answering(*turns):
    """Run a gateway that answers with the turn after those which the prompt has results of tools for."""

    def answer(generation):
        prompt = tool_caller().decode(generation.prompt_token_ids, skip_special_tokens=False)
        text = turns[min(prompt.count("<|im_start|>tool"), len(turns) - 1)]
        return [*tool_caller().backend.encode(text, add_special_tokens=False).ids, EOS]

    service = ScriptedService(answer, model=served_model(max_model_len=8192))
    with running_app(create_app(service, tool_caller(), GatewaySettings())) as url:
        yield f"{url}/v1", service


class City(pydantic.BaseModel):
    """A city."""

    name: str
    people: int


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return f"sunny in {city}"


def get_time(city: str) -> str:
    """Return the time in a city."""
    return f"noon in {city}"


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain_binds_tools_and_parses_structured_output(responses):
    with answering(TURNS[0]) as (url, _):
        model = ChatOpenAI(model="tiny", base_url=url, api_key="x", use_responses_api=responses)
        answer = model.bind_tools([get_weather, get_time]).invoke([HumanMessage("Weather in Rome?")])
        (called,) = answer.tool_calls
        assert (called["name"], called["args"]) == ("get_weather", {"city": "Rome"})
        chunks = list(model.bind_tools([get_weather]).stream([HumanMessage("Weather in Rome?")]))
        streamed = sum(chunks[1:], chunks[0])
        assert [(each["name"], each["args"]) for each in streamed.tool_calls] == [("get_weather", {"city": "Rome"})]
    with answering('{"name": "Rome", "people": 3}') as (url, service):
        model = ChatOpenAI(model="tiny", base_url=url, api_key="x", use_responses_api=responses)
        assert model.with_structured_output(City).invoke("Where?") == City(name="Rome", people=3)
        assert "people" in service.started[-1].sampling.constraint.text


@pytest.mark.parametrize("kind", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_an_agent_calls_two_tools_and_answers(kind, streams):
    agents.set_tracing_disabled(True)

    async def run(url):
        client = openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=600)
        agent = agents.Agent(
            name="guide",
            instructions="Help.",
            model=kind(model="tiny", openai_client=client),
            tools=[agents.function_tool(get_weather), agents.function_tool(get_time)],
        )
        async with client:
            if not streams:
                return await agents.Runner.run(agent, "Rome now?")
            result = agents.Runner.run_streamed(agent, "Rome now?")
            async for _ in result.stream_events():
                pass
            return result

    with answering(*TURNS) as (url, service):
        result = asyncio.run(run(url))
    assert result.final_output == TURNS[-1]
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs == ["sunny in Rome", "noon in Rome"]
    assert len(service.started) == 3


def test_an_agent_keeps_its_state_on_the_server():
    agents.set_tracing_disabled(True)

    async def run(url):
        client = openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=600)
        agent = agents.Agent(name="guide", model=agents.OpenAIResponsesModel(model="tiny", openai_client=client))
        async with client:
            first = await agents.Runner.run(agent, "Who are you?")
            return await agents.Runner.run(agent, "And I?", previous_response_id=first.last_response_id)

    with answering("A guide.") as (url, service):
        assert asyncio.run(run(url)).final_output == "A guide."
    prompt = tool_caller().decode(service.started[-1].prompt_token_ids, skip_special_tokens=False)
    assert "Who are you?" in prompt
    assert "A guide." in prompt
    assert prompt.index("A guide.") < prompt.index("And I?")
