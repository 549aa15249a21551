"""The check of a peer's Hello, which decides who may talk to a worker; and the worker's own
Hello."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages import PROTOCOL_VERSION, Hello, HelloAccepted, HelloRefused, Role
from protocol.registration import generation

_ONE_GROUP = "layers that all keep all tokens"
NO_HELLO = HelloRefused(what="hello", ours="required first", theirs="none")


@dataclass(frozen=True)
class HelloPolicy:
    """Our identity, and the check of peers: their fingerprints must equal ours."""

    worker_id: str
    incarnation: str
    model_fingerprint: str
    layout_fingerprint: str
    machine: str = ""
    pid: int = 0
    weight_version: str = ""
    revision: str = ""
    kv_groups: str = ""

    def answer(self, hello: Hello) -> HelloAccepted | HelloRefused:
        """The answer after comparing version and model, then the layout. Empty fingerprints of a
        router are not compared. Only equal fingerprints prove that KV is the same. A worker that
        has no fingerprint yet asks for weights."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return HelloRefused(
                what="protocol version",
                ours=str(PROTOCOL_VERSION),
                theirs=str(hello.protocol_version),
            )
        may_lack = hello.role is Role.ROUTER or not (
            hello.model_fingerprint or hello.layout_fingerprint
        )
        for what, ours, theirs in (
            ("model fingerprint", self.model_fingerprint, hello.model_fingerprint),
            ("KV layout fingerprint", self.layout_fingerprint, hello.layout_fingerprint),
        ):
            if ours and ours != theirs and (theirs or not may_lack):
                return self._refusal(what, ours, theirs, hello)
        return HelloAccepted(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            machine=self.machine,
            pid=self.pid,
        )

    def hello(self, role: Role) -> Hello:
        """Our own Hello, as a worker of this role."""
        return Hello(
            sender=self.worker_id,
            role=role,
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint=self.model_fingerprint,
            layout_fingerprint=self.layout_fingerprint,
            weight_version=self.weight_version,
            revision=self.revision,
            kv_groups=self.kv_groups,
        )

    def _refusal(self, what: str, ours: str, theirs: str, hello: Hello) -> HelloRefused:
        """Names both fingerprints and, as far as they are known, both generations, and both groups
        of layers if they differ."""
        own = [generation(self.weight_version, self.revision)]
        other = [generation(hello.weight_version, hello.revision)]
        if self.kv_groups != hello.kv_groups:
            own.append(f"KV of {self.kv_groups or _ONE_GROUP}")
            other.append(f"KV of {hello.kv_groups or _ONE_GROUP}")
        return HelloRefused(what=what, ours=_with(ours, own), theirs=_with(theirs, other))


def _with(fingerprint: str, details: list[str]) -> str:
    known = ", ".join(each for each in details if each)
    return f"{fingerprint} ({known})" if known else fingerprint
