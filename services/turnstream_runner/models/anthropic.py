"""Anthropic's Messages.

Its rules for a conversation, beside those that every provider has: there is no blank text, a failed tool says so beside
its result, and an answer has a largest length, which is the model's own where the agent sets none. What every request
begins with (instructions, tools, the conversation so far) is marked to be cached.

How much a model reasons is said to new ones as an effort. To older ones it is a budget of tokens, which counts against
`max_tokens`: so it is half of that at most, and `max_tokens` has to leave room for the smallest one.
"""

import os
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final

from anthropic import AsyncAnthropic, Timeout
from anthropic.types.beta import BetaThinkingConfigParam
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
from pydantic_ai.profiles.anthropic import (
    ANTHROPIC_THINKING_BUDGET_MAP,
    AnthropicModelProfile,
    resolve_anthropic_effort,
)
from pydantic_ai.providers.anthropic import AnthropicProvider

from turnstream.session.messages import AssistantMessage, ToolMessage, UserMessage
from turnstream.settings import ModelSettings
from turnstream_runner.models import prompt
from turnstream_runner.models.port import ModelError, ModelRequest
from turnstream_runner.models.sent_back import read
from turnstream_runner.models.wire import CONNECT, Wire, key_of

ADDRESS: Final = "https://api.anthropic.com"
"""Said, so that the client does not look for another one in the environment."""
PROFILE: Final = AnthropicModelProfile(
    # With it, what a model does not take would be left out; its provider says so.
    anthropic_disallows_sampling_settings=False,
)
BUDGET_MIN: Final = 1024
"""Tokens of the smallest budget that Anthropic takes."""


class AnthropicMessages(Wire):
    """Raises `ModelError` where there is no key."""

    manner = prompt.Manner(blanks=False, failures=True)
    overflows: ClassVar[tuple[str, ...]] = ("exceed context limit",)

    def __init__(self, settings: ModelSettings, *, environment: Mapping[str, str] = os.environ) -> None:
        key = key_of(settings, environment)
        self._client = AsyncAnthropic(
            api_key=key,
            # The client puts `/v1` before each path; addresses of other servers are often given with it.
            base_url=(settings.base_url or ADDRESS).rstrip("/").removesuffix("/v1"),
            max_retries=0,  # there is one retry layer, ours
            timeout=Timeout(settings.silence, connect=CONNECT),
            # Anthropic takes the key as a bearer now; others who speak its language, where it took it before.
            default_headers={"X-Api-Key": key} if settings.base_url else None,
        )
        model = AnthropicModel(
            settings.model, provider=AnthropicProvider(anthropic_client=self._client), profile=PROFILE
        )
        super().__init__(model, settings, key)
        self._profile = model.profile

    async def close(self) -> None:
        await self._client.close()

    def _said(self, request: ModelRequest) -> AnthropicModelSettings:
        said = AnthropicModelSettings(
            **prompt.settings(request), anthropic_cache_instructions=True, anthropic_cache_tool_definitions=True
        )
        if self._settings.base_url:  # what others who speak Anthropic's language have had for longer
            said["anthropic_cache_messages"] = True
        else:
            said["anthropic_cache"] = True
        self._reason(request, said)
        return said

    def _keeps(self, part: ThinkingPart) -> bool:
        return bool(part.signature)

    def _reason(self, request: ModelRequest, said: AnthropicModelSettings) -> None:
        effort, profile = request.params.get("reasoning_effort"), self._profile
        shown = bool(request.params.get("reasoning_summary"))
        if effort == "none":
            said["thinking"] = False
            return
        if effort and profile.get("anthropic_supports_effort"):
            said["anthropic_effort"] = resolve_anthropic_effort(
                effort,
                supports_xhigh=profile.get("anthropic_supports_xhigh_effort", False),
                supports_max=profile.get("anthropic_supports_max_effort", True),
            )
        config: BetaThinkingConfigParam | None = None
        if profile.get("anthropic_supports_adaptive_thinking"):
            config = {"type": "adaptive"} if effort or shown else None
        elif effort and not self._must_not_begin(request):
            config = {"type": "enabled", "budget_tokens": _budget(effort, request.params.get("max_tokens"))}
        if config:
            if shown:
                config["display"] = "summarized"
            said["anthropic_thinking"] = config

    def _must_not_begin(self, request: ModelRequest) -> bool:
        """Whether a turn has called tools without reasoning, as far as is known: it cannot go on with it, for Anthropic
        wants it to begin with what it thought. So where that is lost, the rest of the turn does without."""
        replies = [read(item, self._source) for item in _open_turn(request)]
        return bool(replies) and not any(back and back.has_thoughts for back in replies)


def _open_turn(request: ModelRequest) -> Iterator[bytes]:
    """The opaque items of the replies that the last results of tools go back to, the last one first. Whoever speaks
    behind a result is in one message with it, and ends no turn."""
    items = iter(reversed(request.opaque))
    is_prompt = False
    for message in reversed(request.messages):
        match message:
            case UserMessage():
                is_prompt = True
            case ToolMessage():
                is_prompt = False
            case AssistantMessage(text=text, tool_calls=calls):
                item = next(items, b"")
                if not (calls or text.strip()):  # nothing of it is sent
                    continue
                if is_prompt:
                    return
                yield item


def _budget(effort: str, most: int | None) -> int:
    wanted = ANTHROPIC_THINKING_BUDGET_MAP[effort]
    if most is None:
        return wanted
    if most < 2 * BUDGET_MIN:
        raise ModelError(f"`reasoning_effort` of this model needs `max_tokens` of {2 * BUDGET_MIN} or more, or none")
    return min(wanted, most // 2)
