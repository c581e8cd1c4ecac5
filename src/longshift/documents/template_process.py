"""A chat template in a process of its own, with a deadline and a limit of memory: a template is a
program that came with a model, and a few words of it may loop for hours or fill the machine.

    parent                                                 child
    {"method": "render", "arguments": [chat, "last"]}  ->  Jinja, at most DEADLINE_S a rendering
                                                           and MOST_BYTES
    {"value": ["Hi there", [[3, 9]]]}                  <-  or what the template refuses; or the
                                                           child is gone, and the conversation is
                                                           refused

A line of JSON each way. The child ends with the process that asked.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from longshift.dist.launcher import end_with_parent
from longshift.documents.template import Chat, ChatTemplate, RenderedConversation, UnsoundTemplate
from longshift.errors import DataError

if TYPE_CHECKING:  # the process of a template starts quickly
    from longshift.config_parts import Learn

# Processor seconds for one rendering. A long conversation is rendered twice for each turn of the
# assistant.
DEADLINE_S = 20.0
MOST_BYTES = 4 << 30
_CODE = "import sys; from longshift.documents.template_process import serve; serve(*sys.argv[1:])"


class TemplateProcess:
    """Renders with `template` in a child, which is started at the first conversation. Mutable: the
    child. Not for several threads."""

    def __init__(
        self, template: ChatTemplate, deadline_s: float = DEADLINE_S, most_bytes: int = MOST_BYTES
    ):
        self.template = template
        self._limits = deadline_s, most_bytes
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child."""
        if self._child:
            self._child.kill()
            self._child.communicate()
            self._child = None

    @cached_property
    def variables(self) -> set[str]:
        """Names that the template reads and does not set itself."""
        return set(self._call("list_variables"))

    def write(self, chat: Chat) -> str:
        """`ChatTemplate.write`. Raises UnsoundTemplate, also where it takes too long
        or too much memory."""
        return self._call("write", chat)

    def render(self, chat: Chat, learn: "Learn") -> RenderedConversation:
        """`ChatTemplate.render`. Raises UnsoundTemplate, also where it takes too long
        or too much memory."""
        text, learned = self._call("render", chat, learn)
        return RenderedConversation(text, tuple((first, last) for first, last in learned))

    def turn_end(self) -> str | None:
        """`ChatTemplate.turn_end`; None, too, where it takes too long or too much memory."""
        try:
            return self._call("turn_end")
        except UnsoundTemplate:
            return None

    def _call(self, method: str, *arguments: Any) -> Any:
        """What a method of the template returns in the child."""
        self._child = self._child or self._started()
        assert self._child.stdin
        assert self._child.stdout
        try:
            request = json.dumps({"method": method, "arguments": arguments}, default=str)
            self._child.stdin.write(request + "\n")
            self._child.stdin.flush()
            answer = json.loads(self._child.stdout.readline())
        except (BrokenPipeError, ValueError):
            raise UnsoundTemplate(self._why_gone()) from None
        if "unsound" in answer:
            raise UnsoundTemplate(answer["unsound"])
        if "fault" in answer:
            raise DataError(answer["fault"])
        return answer["value"]

    def _started(self) -> subprocess.Popen[str]:
        arguments = [json.dumps(asdict(self.template)), *map(str, self._limits), str(os.getpid())]
        command = [sys.executable, "-P", "-X", "utf8", "-c", _CODE, *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, encoding="utf-8"
        )

    def _why_gone(self) -> str:
        """Ends what is left of the child."""
        assert self._child
        child = self._child
        self._child = None
        _, errors = child.communicate()
        last_line = errors.strip().splitlines()[-1:]
        deadline_s, most_bytes = self._limits
        where = f"the chat template ({self.template.where})"
        if child.returncode == -signal.SIGPROF:
            return f"{where} computes for more than {deadline_s:g} s: look for loops in loops"
        if "MemoryError" in last_line:
            return (
                f"{where} takes more than {most_bytes / 2**30:.3g} GiB of memory: look for texts"
                " that grow in a loop"
            )
        if child.returncode == -signal.SIGKILL:
            return f"{where} was killed while it rendered: the machine may lack memory for it"
        return f"{where} ended its process with {child.returncode}: {' '.join(last_line)[:300]}"


def serve(template: str, deadline_s: str, most_bytes: str, parent: str) -> None:
    """Answer conversations from standard input until it ends. The process ends by SIGPROF where one
    takes too long."""
    end_with_parent(signal.SIGKILL, int(parent))

    # A process may lower its hard limit, never raise it.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(most_bytes)
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    seconds = float(deadline_s)

    class Limited(ChatTemplate):
        """Each of its renderings has a deadline."""

        def _write(self, chat: Chat, first: int | None = None, prompt: bool = False) -> str:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            return super()._write(chat, first, prompt)

    fields = json.loads(template)
    program = Limited(fields["source"], fields["where"], fields["names"], tuple(fields["special"]))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        request = json.loads(line)
        answer = _answer(program, request["method"], request["arguments"])
        print(json.dumps(answer), flush=True)


def _answer(program: ChatTemplate, method: str, arguments: list[Any]) -> dict[str, Any]:
    """The answer to a request, as JSON. A conversation, if there is one, is the first argument."""
    if arguments:
        arguments[0] = Chat._make(arguments[0])  # JSON made a list of it
    try:
        return {"value": getattr(program, method)(*arguments)}
    except UnsoundTemplate as fault:
        return {"unsound": str(fault)}
    except DataError as fault:
        return {"fault": str(fault)}
