"""Lets ranks tell each other: in the group that they train in, or over a channel of their own.

A failure on one rank becomes one on all: start at :func:`agree` and :func:`exchange`. Ranks save and load over a
:class:`Channel`: who does not come is named. A save must neither hang because one rank does not take part, nor mix its
messages with those of training, which may go on meanwhile in another thread. So ranks first meet in the store
(:meth:`Channel.arrive`), and then talk over a gloo group that is theirs alone, in JSON: nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import BroadcastOptions, GatherOptions

from fsshard import errors
from fsshard.comm.stores import answer_within, check_not_destroyed, check_not_inherited, timeout_of
from fsshard.comm.watchdog import Watchdog, done_soon, hold_until_done, meet
from fsshard.errors import CheckpointError, FsshardError, RankMismatch
from fsshard.torch_private.c10d import AllgatherOptions, ProcessGroupGloo, allgather_base, broadcast_coalesced

Item = TypeVar("Item")
# Seconds, while a rank waits for another, until it looks whether a third has lost one.
LOOK_EVERY = 1.0
# Seconds, more than LOOK_EVERY, for the ranks that are left, once one is lost, to say so.
LAST_WORDS = 2.5


class Channel:
    """The connections of the ranks of one group. The same calls in the same order on all, one thread at a time."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Use :meth:`of`, so that a group has one gloo group and no more; None is a process that is alone."""
        self.rank = 0
        self.size = 1
        # In messages: the call, and which ranks these are, "" for all.
        self.what = "the checkpoint"
        self.among = ""
        self._gloo: Any = None
        # The tensors of the conversation that goes on, or of the last one, and its limit of time.
        self._sent: list[Tensor] = []
        self._timeout = timedelta()
        self._hurries = False
        if group is None:
            return
        self.rank = group.rank()
        self.size = group.size()
        if self.size == 1:
            return
        self._limit = timeout_of(group)
        self._group = weakref.ref(group)
        self._place = ""
        members = dist.get_process_group_ranks(group)
        if members != list(range(self.size)):
            listed = list(map(str, members[:8]))
            if self.size > 8:
                listed.append("...")
            self.among = f" (of the group of global ranks {', '.join(listed)})"
        with self._store_errors():
            self._watchdog = Watchdog.made()

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Channel:
        """Return that of a group, made when first asked for; it goes with the group."""
        if group is None:
            return cls(None)
        check_not_inherited(group, "saving, loading or exporting a wrapped model")
        check_not_destroyed(group, "saving, loading or exporting a wrapped model")
        if group not in _channels:
            _channels[group] = cls(group)
        return _channels[group]

    def hurry(self) -> None:
        """Wait no longer than the group's own timeout from now on: this rank ends, since training has lost another."""
        self._hurries = True

    @property
    def patience(self) -> float:
        """Seconds that it takes at most, beyond the timeout of what ranks wait for, to say that one is lost."""
        if self.size == 1:
            return 0.0
        return LOOK_EVERY + 2 * self._watchdog.store.limit + LAST_WORDS

    # ------------------------------------------------------------------------------------------------ arriving

    def arrive(self, what: str, timeout: float, name: str = "") -> None:
        """Return when all ranks have called this with the same ``what``; then they can talk to each other.

        A rank that did not come within ``timeout`` seconds, or came for something else, is named by the ``failures`` of
        a CheckpointError on every rank that came, and on one that comes later as soon as it does. All can arrive for
        the next call. ``name``: the call in messages from here on; ``what`` itself if empty.
        """
        self.what = what
        group = self._group() if self.size > 1 else None
        if group is not None:
            note = json.dumps([what, self._gloo is not None])
            with self._store_errors():
                meeting = self._watchdog.meet(group, what, note, timeout, self)
            self._place = meeting.place
            calls = {}
            all_connected = True
            for rank, text in meeting.notes.items():
                call, connected = json.loads(text)
                calls[rank] = f"called {call}"
                all_connected = all_connected and connected
            failures = dict(meeting.missing)
            must = f"call {name or what}, not under `if rank == 0:`"
            if len(set(calls.values())) > 1:
                failures |= calls
                must = "make the same call"
            if failures:
                raise CheckpointError(f"all {self.size} ranks must {must}{self.among}; nothing was done", failures)
            if not all_connected:
                self._connect(timeout)
        self.what = name or what

    def _connect(self, timeout: float) -> None:
        self.drop()
        limit = max(timeout, 1.0)
        place = f"{self._place}/gloo"
        store = self._watchdog.store

        # Not dist.new_group: with use_local_synchronization torch (2.13) puts into the name of a group how many groups
        # the process knows, which differs between ranks that are in different ones, and these wait for each other in
        # vain; without it all ranks of the world must call. And such a group outlives the one that it serves.
        def connected() -> ProcessGroupGloo:
            own_keys = PrefixStore(place, store.another())
            return ProcessGroupGloo(own_keys, self.rank, self.size, timedelta(seconds=limit))

        try:
            self._gloo = answer_within(limit + store.limit, connected)
        except (RuntimeError, ValueError) as error:  # dist.DistError among them
            self._lost(RuntimeError(f"cannot connect over gloo: {error}"))

    # ------------------------------------------------------------------------------------------------ talking

    def gather(self, value: Any, timeout: float | None = None) -> list[Any]:
        """Return ``value`` of every rank, by rank, as JSON gives it back: lists for tuples, strings for all keys.

        It raises CheckpointError on every rank if one was lost, or has a value that JSON does not know. ``timeout``:
        seconds; None for the process group's own. A rank that dies is noticed at once.
        """
        return self._gathered(value, timeout, self._all_gather)

    def gather_first(self, value: Any, timeout: float | None = None) -> list[Any]:
        """Return ``value`` of every rank on rank 0, and an empty list on the others. JSON must know it."""
        return self._gathered(value, timeout, self._gather_rows)

    def _gathered(self, value: Any, timeout: float | None, gather_rows: Callable[[bytes], list[bytes]]) -> list[Any]:
        text = _encoded(value)
        if self.size == 1:
            return self._values([text])
        with self._conversation(timeout):
            # Rows have one length: that of the longest text.
            own_length = f"{len(text):20}"
            lengths = list(map(int, self._all_gather(own_length.encode())))
            longest = max(lengths)
            rows = gather_rows(text.ljust(longest))
        return self._values(_cut(rows, lengths))

    def tell(self, value: Any, timeout: float | None = None) -> Any:
        """Return rank 0's ``value`` on every rank, as JSON gives it back."""
        text = b""
        if self.rank == 0:
            text = _encoded(value)
        if self.size > 1:
            with self._conversation(timeout):
                length = self._broadcast(f"{len(text):20}".encode())
                text = self._broadcast(text.ljust(int(length)))
        (answer,) = self._values([text])
        return answer

    def _values(self, texts: Sequence[bytes]) -> list[Any]:
        values = []
        unsaid = {}
        for rank, text in enumerate(texts):
            answer = json.loads(text)
            values.append(answer.get("value"))
            if "unsaid" in answer:
                unsaid[rank] = answer["unsaid"]
        if unsaid:
            raise CheckpointError(f"{self.what}: values that cannot be sent to the other ranks", unsaid)
        return values

    @contextmanager
    def _conversation(self, timeout: float | None) -> Iterator[None]:
        """Raise what is right where a rank is lost within."""
        if self._gloo is None:
            raise CheckpointError(f"{self.what}: the ranks have lost their connection, or are not connected yet")
        self._timeout = timedelta(seconds=self._limit if timeout is None else timeout)
        # Tensors that a thread of gloo were the last to let go of would make it wait for the interpreter's lock,
        # which who frees the group may hold: a deadlock (pytorch issue #56297). So they live until the next exchange
        # has ended.
        sent_before = self._sent
        self._sent = []
        try:
            yield
        except RuntimeError as error:
            # "Connection closed by peer", "Timed out waiting", "Broken pipe" and so on (gloo of torch 2.13). No frame
            # may hold the group any longer: its connections close with it.
            self._lost(error.with_traceback(None))
        del sent_before

    def _all_gather(self, text: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        whole = torch.empty(self.size * len(text), dtype=torch.uint8, device="cpu")
        self._sent += [own, whole]
        options = AllgatherOptions()
        options.timeout = self._timeout
        self._done(allgather_base(self._gloo, whole, own, options))
        return [row.tobytes() for row in whole.numpy().reshape(self.size, -1)]

    def _gather_rows(self, text: bytes) -> list[bytes]:
        """Return every rank's text, of one length, on rank 0, and nothing on the others."""
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = []
        if self.rank == 0:
            rows = list(own.new_empty(self.size, len(text)).unbind())
        self._sent += [own, *rows]
        options = GatherOptions()
        options.timeout = self._timeout
        options.rootRank = 0
        outputs = [rows] if rows else []
        self._done(self._gloo.gather(outputs, [own], options))
        return [row.numpy().tobytes() for row in rows]

    def _broadcast(self, text: bytes) -> bytes:
        """Return rank 0's text, which has the same length on all ranks."""
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._sent.append(own)
        options = BroadcastOptions()
        options.timeout = self._timeout
        options.rootRank = 0
        self._done(self._gloo.broadcast([own], options))
        return own.numpy().tobytes()

    def _done(self, work: dist.Work) -> None:
        """Wait for one operation of gloo; leave it if another rank has lost one: this rank may wait for a third."""
        begun = time.monotonic()
        looked = begun
        while not done_soon(work, 0.0, on_cpu=True):
            now = time.monotonic()
            if now - looked < LOOK_EVERY:
                continue
            looked = now
            try:
                self._check_losses(now - begun)
            except RuntimeError:
                # Another rank has lost one, or the store gives no answer.
                hold_until_done(work, self._gloo)
                raise

    def _check_losses(self, waited: float) -> None:
        """Raise RuntimeError where another rank has lost one, or this one may wait no longer."""
        why = self._watchdog.store.get(f"{self._place}/lost/first")
        if why is not None:
            raise RuntimeError(why.decode())
        if self._hurries and waited > self._limit:
            raise RuntimeError(f"this rank is leaving the job after it waited {self._limit:g} s for the others")

    # ------------------------------------------------------------------------------------------------ losses

    @property
    def lost(self) -> bool:
        """Return whether the connections are closed: a rank was lost."""
        return self.size > 1 and self._gloo is None

    def drop(self) -> None:
        """Close the connections; ranks that wait for this one notice it."""
        self._gloo = None

    def _lost(self, error: RuntimeError) -> NoReturn:
        """Let the others know, find out who is left, and raise."""
        self.drop()
        store = self._watchdog.store
        place = f"{self._place}/lost"
        missing = {}
        # gloo guesses at reasons at length.
        why = str(error).partition(". This is")[0]
        loss = "lost a rank"
        try:
            store.set(f"{place}/first", why)
            store.set(f"{place}/{self.rank}", "lost one")
            keys = [f"{place}/{rank}" for rank in range(self.size)]
            if not store.awaited(keys, LAST_WORDS):
                for rank, key in enumerate(keys):
                    if store.get(key) is None:
                        missing[rank] = "no answer: it has ended, hangs, or cannot be reached"
        except RuntimeError:  # dist.DistError among them
            missing = {}
            loss = "lost a rank, and the store of the process group with it (rank 0 or the launcher hosts it)"
        raise CheckpointError(f"{self.what} {loss}{self.among}: {why}", missing) from error

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except RankMismatch as error:
            raise CheckpointError(str(error)) from error
        except (RuntimeError, ValueError) as error:
            if isinstance(error, FsshardError):
                raise
            raise CheckpointError(
                f"{self.what}: the store of the process group cannot be reached: {error}; rank 0 or the launcher "
                "hosts it, and may have ended"
            ) from error


_channels: WeakKeyDictionary[dist.ProcessGroup, Channel] = WeakKeyDictionary()


def _cut(rows: Sequence[bytes], lengths: Sequence[int]) -> list[bytes]:
    """Return rows without what was appended to make all as long; none where there are none."""
    texts = [row[:length] for row, length in zip(rows, lengths, strict=False)]
    return texts


def _encoded(value: Any) -> bytes:
    """Return the value as JSON, or why it cannot be: a rank that raised here would leave the others waiting."""
    try:
        return json.dumps({"value": value}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps({"unsaid": f"{type(error).__name__}: {error}"}).encode()


Over = dist.ProcessGroup | Channel | None
"""How ranks talk: in the group that they train in, or over a channel of their own; None is a rank alone."""
BROADCAST_BYTES = 250 * 2**20
EVERYWHERE_SENT = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
EVERYWHERE_SENT |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}


def per_rank(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return ``value`` of every rank of the group, in rank order. Collective; small Python objects only."""
    check_not_inherited(group, "a call of all ranks")
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


@torch.no_grad()
def broadcast_tensors(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    source: int = 0,
) -> None:
    """Send the values of one rank of the group to every other, coalesced by dtype. Collective."""
    real = []
    sent = []
    for tensor in tensors:
        if not tensor.numel():
            continue
        values = tensor.detach()
        if values.is_complex():
            values = torch.view_as_real(values)
        real.append(values)
        # Others as bytes: gloo (torch 2.13) says "Invalid scalar type" of int16, uint16, uint32 and 8-bit floats.
        if values.dtype not in EVERYWHERE_SENT:
            values = values.reshape(-1).view(torch.uint8)
        sent.append(values)
    if sent:
        broadcast_coalesced(group, sent, BROADCAST_BYTES, source)
    for tensor, values in zip(real, sent, strict=True):
        # A copy was sent of what is not contiguous.
        if not tensor.is_contiguous() and tensor is not values:
            tensor.copy_(values.view(tensor.dtype).view(tensor.shape))


def batches(
    items: Iterable[Item],
    nbytes: Callable[[Item], int],
    most: int,
    kind: Callable[[Item], object] = lambda _: None,
) -> Iterator[list[Item]]:
    """Yield successive items of one kind, of at most ``most`` bytes together; a larger one is alone."""
    batch: list[Item] = []
    batch_bytes = 0
    for item in items:
        size = nbytes(item)
        if batch and (batch_bytes + size > most or kind(item) != kind(batch[0])):
            yield batch
            batch = []
            batch_bytes = 0
        batch.append(item)
        batch_bytes += size
    if batch:
        yield batch


def agree(
    over: Over,
    work: Callable[[], Any],
    timeout: float | None = None,
) -> Any:
    """Run ``work`` on every rank; if it raises anywhere, raise everywhere. One collective. See :func:`exchange`."""
    # The result need not travel: only whether there is one.
    results = []
    exchange(over, lambda: results.append(work()), timeout)
    return results[0]


def exchange(
    over: Over,
    work: Callable[[], Any],
    timeout: float | None = None,
) -> list[Any]:
    """Run ``work`` on every rank, and return all results, by rank; if it raises anywhere, raise everywhere.

    In a group the rank whose work failed raises its own error, and the others one of that kind which names the rank:
    RankMismatch, if it is none of ours. Over a channel all raise the same, whose ``failures`` says what went wrong on
    which rank: of the kind that these raised, else CheckpointError.

    Args:
        over: how the ranks talk.
        work: local, that is without collectives. It returns a small object; over a channel one that JSON can say.
        timeout: seconds, over a channel; None for its group's own. A rank's work may take that much longer than
            another's.
    """
    result, error = _tried(over, work)
    if over is None or (over.size if isinstance(over, Channel) else over.size()) == 1:
        if error is not None:
            raise error
        # A channel of one rank refuses what JSON does not know, too.
        return over.gather(result) if isinstance(over, Channel) else [result]
    report = {"result": result} if error is None else {"error": _described(error)}
    try:
        reports = over.gather(report, timeout) if isinstance(over, Channel) else per_rank(over, report)
    except CheckpointError as lost:
        raise lost from error
    failures = {rank: report["error"] for rank, report in enumerate(reports) if "error" in report}
    if failures and isinstance(over, Channel):
        raise _combined(over, failures, error) from error
    if error is not None:
        raise error
    for rank, failure in failures.items():
        kind = getattr(errors, failure["kind"], RankMismatch)
        raise _error(kind, f"rank {rank}: {failure['text']}", failure["attributes"])
    return [report["result"] for report in reports]


def exchange_first(channel: Channel, work: Callable[[], Any], timeout: float | None = None) -> list[Any]:
    """Do as :func:`exchange` over a channel, but return the results on rank 0 alone, and nothing on the others."""

    def said() -> Any:
        value = work()
        # What cannot be sent is this rank's failure, of which rank 0 alone would hear otherwise.
        json.dumps(value)
        return value

    result, error = _tried(channel, said)
    report = {"result": result} if error is None else {"error": _described(error)}
    failed = []
    results = []
    try:
        for rank, of_rank in enumerate(channel.gather_first(report, timeout)):
            if "error" in of_rank:
                failed.append((rank, of_rank["error"]))
            else:
                results.append(of_rank["result"])
        failures = dict(channel.tell(failed, timeout))
    except CheckpointError as lost:
        raise lost from error
    if failures:
        raise _combined(channel, failures, error) from error
    return results


def _tried(over: Over, work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the result of ``work``, or None and what it raised."""
    try:
        return work(), None
    except FsshardError as raised:
        # The text of our own errors is enough: frames of the checks would hide the caller's line.
        return None, raised.with_traceback(None)
    except Exception as raised:
        return None, raised
    except BaseException:
        # Ctrl-C, say: the others must not wait for this rank.
        if isinstance(over, Channel):
            over.drop()
        raise


def check_alike(
    group: dist.ProcessGroup | None,
    call: str,
    facts: Mapping[str, str],
    advice: str,
) -> None:
    """Raise RankMismatch on every rank unless all were given the same. Collective; for rare calls, which are met first.

    ``facts`` are texts by name, ``call`` is as users write it, and ``advice`` says what to do instead.
    """
    digests = meet(group, call, digest_of(facts))
    if group is not None and len(set(digests)) > 1:
        raise_differences(group, call, facts, digests, advice)


def digest_of(facts: Mapping[str, str]) -> str:
    """Return a digest of texts by name, whatever their order."""
    return hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()


def raise_differences(
    group: dist.ProcessGroup,
    call: str,
    facts: Mapping[str, str],
    digests: Sequence[str],
    advice: str,
) -> NoReturn:
    """Raise RankMismatch, which says what differs in the facts of two ranks; ``digests``: of all ranks. Collective."""
    tables = per_rank(group, dict(facts))
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    here = tables[0]
    there = tables[other]
    differences = []
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            text = f"{name} is {here.get(name, 'not given')} and {there.get(name, 'not given')}"
            differences.append(text[:200])
    if len(differences) > 3:
        differences[3:] = [f"and {len(differences) - 3} more"]
    what = f"{call}: ranks 0 and {other} were given different things"
    raise RankMismatch(f"{what}: {'; '.join(differences)}; {advice}")


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Numbers in a row that are added before anything is multiplied.
_WIDTH = 1024


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Return a 0-dim int64 tensor, on the same device, that tensors of other bits do not share by chance.

    Nothing is read on the host. Sums of rows and columns are weighted by their places, so that order counts, too.
    """
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if values.is_complex():
        values = torch.view_as_real(values)
    numbers = values.view(_INTEGERS[values.itemsize]).reshape(-1)
    full = len(numbers) // _WIDTH * _WIDTH
    rows = numbers[:full].view(-1, _WIDTH)
    rest = numbers[full:].to(torch.int64)
    sums_of_columns = rows.sum(0, dtype=torch.int64)
    sums_of_rows = rows.sum(1, dtype=torch.int64)
    sums = torch.cat([sums_of_columns, sums_of_rows, rest])
    # Weights in which no few add up to none, as small ones do: products wrap around.
    weights = torch.arange(1, len(sums) + 1, device=sums.device) * 0x1E3779B97F4A7C15
    weights = (weights ^ (weights >> 29)) * 0x3F58476D1CE4E5B9
    return (sums * weights).sum()


def has_numbers(value: Tensor) -> bool:
    """Return whether this rank has all numbers of a tensor, one by one in its memory."""
    # Subclasses keep their numbers as they like: a DTensor has a part of them here, one of an estimate has none.
    is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    return is_plain and not (value.is_meta or value.is_nested or value.is_quantized)


def described_tensor(value: Tensor) -> str:
    """Return a tensor's dtype and shape, and a digest of its numbers where this rank has all of them."""
    text = f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    if not has_numbers(value):
        return text
    return f"{text} with digest {int(fingerprint(value)) & (2**48 - 1):012x}"


def _combined(
    channel: Channel,
    failures: Mapping[int, dict[str, Any]],
    error: Exception | None,
) -> Exception:
    """Return what all ranks raise, from what some of them have raised; ``error`` is this rank's."""
    texts = {rank: failure["text"] for rank, failure in failures.items()}
    kinds = {failure["kind"] for failure in failures.values()}
    kind = CheckpointError
    if len(kinds) == 1:
        kind = getattr(errors, kinds.pop(), CheckpointError)
    # All ranks raised the same, and each raises its own.
    if isinstance(error, kind) and len(texts) == channel.size and len(set(texts.values())) == 1:
        return error
    combined = CheckpointError(f"{channel.what} failed{channel.among}", texts)
    if kind is CheckpointError:
        return combined
    if error is None:
        first = next(iter(failures.values()))
        attributes = first["attributes"]
    else:
        attributes = vars(error)
    return _error(kind, str(combined), {**attributes, "failures": combined.failures})


def _described(error: Exception) -> dict[str, Any]:
    """Describe an error as JSON can; only errors of ours keep their kind."""
    text = str(error)
    for kind in type(error).__mro__:
        if kind is not FsshardError and vars(errors).get(kind.__name__) is kind:
            if kind is not type(error):
                text = f"{type(error).__name__}: {text}"
            attributes = json.dumps(vars(error), default=str, skipkeys=True)
            return {"kind": kind.__name__, "text": text, "attributes": json.loads(attributes)}
    return {"kind": "", "text": f"{type(error).__name__}: {text}", "attributes": {}}


def _error(
    kind: type[FsshardError],
    message: str,
    attributes: Mapping[str, Any],
) -> FsshardError:
    # Not by its constructor, which takes other arguments.
    error = kind.__new__(kind)
    error.args = (message,)
    error.__dict__.update(attributes)
    return error
