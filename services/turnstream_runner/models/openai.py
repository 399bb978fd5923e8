"""OpenAI's two interfaces: Responses, which is the one that it recommends, and chat completions, which other servers
speak as well.

OpenAI is asked not to store responses: what a session says is erased with the session. So what its reasoning models
want back within a run (their reasoning, encrypted) comes with each reply, and is kept as the run's opaque items.
"""

import os
from collections.abc import Mapping
from typing import Final

from openai import AsyncOpenAI, Timeout
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel, OpenAIResponsesModelSettings
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers import Provider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

from turnstream.settings import ModelSettings
from turnstream_runner.models import prompt
from turnstream_runner.models.port import ModelRequest
from turnstream_runner.models.sent_back import TAGGED
from turnstream_runner.models.wire import CONNECT, Wire, key_of

ADDRESS: Final = "https://api.openai.com/v1"
"""Said, so that the client does not look for another one in the environment."""
PROFILE: Final = OpenAIModelProfile(
    openai_chat_streaming_requires_finish_reason=True,
    # With it, what a model that reasons does not take would be left out; its provider says so.
    openai_supports_reasoning=False,
)


class _OpenAI(Wire):
    def __init__(self, settings: ModelSettings, *, environment: Mapping[str, str] = os.environ) -> None:
        key = key_of(settings, environment)
        self._client = AsyncOpenAI(
            api_key=key,
            base_url=settings.base_url or ADDRESS,
            max_retries=0,  # there is one retry layer, ours
            timeout=Timeout(settings.silence, connect=CONNECT),
        )
        provider: Provider[AsyncOpenAI] = (
            OpenAICompatibleProvider("openai-compatible", openai_client=self._client)
            if settings.base_url
            else OpenAIProvider(openai_client=self._client)
        )
        super().__init__(self._class(settings.model, provider=provider, profile=PROFILE), settings, key)

    _class: type[OpenAIChatModel] | type[OpenAIResponsesModel]

    async def close(self) -> None:
        await self._client.close()

    def _said(self, request: ModelRequest) -> OpenAIResponsesModelSettings:
        said = OpenAIResponsesModelSettings(**prompt.settings(request))
        if effort := request.params.get("reasoning_effort"):
            said["openai_reasoning_effort"] = effort
        return said


class OpenAIChat(_OpenAI):
    """Chat completions. Reasoning that came in a field of its own goes back in it; what came as text between tags does
    not. Raises `ModelError` where there is no key."""

    _class = OpenAIChatModel

    def _keeps(self, part: ThinkingPart) -> bool:
        return bool(part.id and part.id != TAGGED and part.content)


class OpenAIResponses(_OpenAI):
    """Responses. Raises `ModelError` where there is no key."""

    _class = OpenAIResponsesModel

    def _said(self, request: ModelRequest) -> OpenAIResponsesModelSettings:
        said = super()._said(request)
        said["openai_store"] = False
        if request.params.get("reasoning_summary"):
            said["openai_reasoning_summary"] = "auto"
        return said

    def _keeps(self, part: ThinkingPart) -> bool:
        """Encrypted, or in plain words as open models give it."""
        return bool(part.id and (part.signature or (part.provider_details or {}).get("raw_content")))
