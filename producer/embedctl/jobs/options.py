"""The options of a job: as callers of the library give them, and as they are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypedDict, Unpack, get_args

from embedctl.corpus.kept import TEXT_SHA256, TOKENS, check_keep
from embedctl.corpus.pieces import PIECE_FIELDS
from embedctl.corpus.records import kind_of
from embedctl_config import tenants
from embedctl_config.errors import SettingsError
from embedctl_config.outputs import PLAIN, Output, outputs_of
from embedctl_config.settings import MAX_CHUNK_RECORDS, MAX_TTL_S, check_model_name, suggestion

#: The longest prompt (bytes). It is put before each text, and all models take far less.
MAX_PROMPT_BYTES = 16 * 1024
#: The longest name of a prompt (bytes).
MAX_PROMPT_NAME = 200
#: The longest idempotency key (bytes). `embedctl run` makes its key from paths.
MAX_KEY_BYTES = 64 * 1024

Long = Literal["cut", "cut-left", "cut-right", "error", "mean", "split"]
#: Those that make one vector of a text.
ONE_VECTOR = tuple(each for each in get_args(Long) if each != "split")
Duplicates = Literal["all", "error"]


class JobOptions(TypedDict, total=False):
    """The options of a job, as :func:`enqueue_embeddings` takes them; each may be left out.

    Attributes:
        model: the model's name at the workers; the model of the settings if None.
        hardware: a hardware class, or "auto" for the fastest that is alive and offers the precision; that of the
            settings if None.
        precision: "fp32", "fp16" or "int8". If None, the class's precision, or fp32 with "auto".
        prompt: put before every text; the model's default prompt if None, no prompt if empty.
        prompt_name: the name of one of the model's own prompts, such as "query", instead of `prompt`.
        long: of a text that is too long for the model, "cut", the default, encodes as much as the model takes, and
            reports it. It loses its end, or its begin if the model's tokenizer says so; "cut-left" and "cut-right"
            choose. "error" fails it; "mean" encodes all of it, window by window, and gives the mean of the windows'
            vectors; "split" makes several records of it, by the model's tokenizer on this machine. Positions then count
            these pieces. The id of one is that of its record, `#` and where it begins; with it come back `parent`, the
            record's id, or its position if it has none, and `start` and `end`, its place in the text (characters).
        normalize: make every vector of unit length; the default.
        dimensions: keep only this many leading components of each vector, for models made for that (Matryoshka); all if
            None.
        dims_anyway: cut vectors also if the model's files do not say that it was made for that.
        vectors: what one pass over the text gives, "dense" if None, of "dense", "sparse" and "multi", as the model can;
            such as ("dense", "sparse"), or "dense,sparse".
        chunk_size: most records in a chunk. A chunk has fewer if they are about two seconds' work, or if each live
            worker can so have a part of the job.
        ttl: seconds to keep the job after its end. Before, it is kept for at least 7 days after its last progress.
        idempotency_key: a second call with this key and the same texts returns the same job; if the first call died
            half-way, the second resumes where it stopped. The key is kept as long as the job.
        max_errors: the error budget: a number of records, or a share such as "1%". More failed records end the job.
        keep: fields of the mappings that come back with the vectors, such as `("title", "url")`. A field that a mapping
            does not have is null. At most 32 fields, and 64 KiB for each record.
        count_tokens: give each record's number of tokens with its vector (:attr:`ChunkVectors.tokens`).
        duplicates: "error" refuses an id that occurs twice; "all", the default, takes it. That is known once `texts`
            has been read, so the call raises when all but the end is queued, and the job is cancelled unless it has an
            idempotency key. Of a small list, nothing is queued.
        tenant: whom the job belongs to; the tenant of the settings if None. Tenants that wait for the same workers take
            turns, by the weights in the settings.
        lane: "interactive" if somebody waits for the vectors, "background" if the job has time: it is done while
            nothing else waits.
        digests: give the SHA-256 of each text with its vector (:attr:`ChunkVectors.digests`), and write it into .npy
            and .parquet files, so that `--sync` can tell what has changed. A job that is resumed by its id stays as it
            was begun.
    """

    model: str | None
    hardware: str | None
    precision: str | None
    prompt: str | None
    prompt_name: str | None
    long: Long
    normalize: bool
    dimensions: int | None
    dims_anyway: bool
    vectors: str | Sequence[str] | None
    chunk_size: int | None
    ttl: float | None
    idempotency_key: str | None
    max_errors: int | str | None
    keep: Sequence[str]
    count_tokens: bool
    duplicates: Duplicates
    tenant: str | None
    lane: str | None
    digests: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """What counts for the tenant of a gateway's job: what is kept of it, `times` as much as it is. If it is known
    beforehand how many `records` it has, and the bytes of their texts, and of their ids and kept fields, the job begins
    only where there is room for all of it. `beside`: the bytes of the tenant's files that are kept as long as the job
    is."""

    times: int
    records: int = 0
    text_bytes: int = 0
    field_bytes: int = 0
    beside: int = 0


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """The options of a submission, checked as far as they can be without a broker; see :class:`JobOptions`. Raises
    SettingsError if one is wrong, or two exclude each other.

    `resume` is the id of a job whose producer did not finish: the submission resumes with the same records, and any
    other option given must be the same as when the job was begun. `keep` names the fields that the records hold as kept
    fields, and so must always be the same. `batch_file`: the job is made of an OpenAI batch file. `drain` asks for a
    job that pauses while Redis holds too many of its results; somebody must drain it.
    `kept` says how what is kept of a gateway's job counts for its tenant; None if it does not.
    `column_types` are those of a corpus in parquet; see :mod:`embedctl.corpus.column_types`. `vectors` are the outputs
    asked for (:class:`~embedctl_config.outputs.Output`), None for dense vectors alone.
    """

    model: str | None = None
    hardware: str | None = None
    precision: str | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    long: Long = "cut"
    normalize: bool = True
    dimensions: int | None = None
    dims_anyway: bool = False
    chunk_size: int | None = None
    ttl: float | None = None
    idempotency_key: str | None = None
    max_errors: int | None = None
    max_errors_share: float | None = None
    resume: str | None = None
    keep: Sequence[str] = ()
    count_tokens: bool = False
    batch_file: bool = False
    drain: bool = False
    duplicates: Duplicates = "all"
    tenant: str | None = None
    lane: str | None = None
    digests: bool = False
    column_types: Mapping[str, str] | None = None
    vectors: Sequence[str] | None = None
    kept: Kept | None = None

    @classmethod
    def of(cls, **given: Unpack[JobOptions]) -> Self:
        """The options that a caller of the library gives; raises TypeError for one that there is not, and SettingsError
        for one that is wrong."""
        known = JobOptions.__optional_keys__
        for name in given:
            if name not in known:
                raise TypeError(f"a job has no option {name!r}{suggestion(name, sorted(known))}")
        options: dict[str, Any] = dict(given)
        options["max_errors"], options["max_errors_share"] = parse_budget(options.get("max_errors"))
        options["keep"] = check_keep(options.get("keep", ()))
        if options.get("long") == "split":
            if taken := set(options["keep"]).intersection(PIECE_FIELDS):
                raise SettingsError(
                    f"keep: {min(taken)!r} is what comes out beside a piece of text (long split): rename the field, or "
                    "do not keep it"
                )
            options["keep"] += PIECE_FIELDS
        return cls(**options)

    @property
    def splits(self) -> bool:
        return self.long == "split"

    @property
    def corpus_keep(self) -> Sequence[str]:
        """The fields to keep that are the corpus's own."""
        return [name for name in self.keep if not (self.splits and name in PIECE_FIELDS)]

    @property
    def outputs(self) -> Sequence[Output]:
        return PLAIN if self.vectors is None else outputs_of(self.vectors)

    def __post_init__(self) -> None:
        self._check_names()
        self._check_texts()
        self._check_numbers()
        self._check_vectors()
        for name, option, what in (
            (TOKENS, self.count_tokens and "count_tokens", "number of tokens"),
            (TEXT_SHA256, self.digests and "digests", "digest of a text"),
        ):
            if option and name in self.keep:
                raise SettingsError(
                    f"keep: {name!r} is what output files call the {what} ({option}): rename the field, or do not "
                    "keep it"
                )

    def _check_names(self) -> None:
        checks = (
            (self.model, check_model_name),
            (self.tenant, tenants.check_tenant),
            (self.lane, tenants.check_lane),
        )
        for name, check in checks:
            if name is not None and (wrong := check(name)):
                raise SettingsError(wrong)
        if self.long not in get_args(Long):
            raise SettingsError(f"long {self.long!r} is none of {', '.join(get_args(Long))}")
        if self.duplicates not in get_args(Duplicates):
            raise SettingsError(f"duplicates {self.duplicates!r} is neither all nor error")

    def _check_texts(self) -> None:
        _check_length("prompt", self.prompt, MAX_PROMPT_BYTES)
        _check_prompt_name(self.prompt_name, self.prompt)
        _check_length("idempotency_key", self.idempotency_key, MAX_KEY_BYTES)
        if self.idempotency_key == "":
            raise SettingsError(
                "idempotency_key is empty, and so would be the same for every job: give this job a key, or leave it out"
            )
        if self.idempotency_key is not None and self.resume is not None:
            raise SettingsError("resume and idempotency_key could name two different jobs: leave one of them out")

    def _check_vectors(self) -> None:
        given = self.vectors
        if given is not None and not isinstance(given, str | list | tuple):
            raise SettingsError(f"vectors is {kind_of(given)}, and not a list such as dense,sparse")
        if self.outputs == PLAIN:
            object.__setattr__(self, "vectors", None)  # one form, because jobs are compared
            return
        object.__setattr__(self, "vectors", [str(each) for each in self.outputs])
        wrong = {"dimensions": self.dimensions is not None, "long mean": self.long == "mean"}
        if whats := [what for what, is_given in wrong.items() if is_given]:
            raise SettingsError(f"{whats[0]} is for dense vectors alone: leave it out, or leave out vectors")
        if self.batch_file and len(self.outputs) > 1:
            raise SettingsError("the requests of a batch file ask for vectors of one kind: name one of vectors")
        if taken := sorted(set(self.keep).intersection(self.outputs)):
            raise SettingsError(f"keep: {taken[0]!r} is what output files call these vectors: rename the field")

    def _check_numbers(self) -> None:
        size, ttl = self.chunk_size, self.ttl
        if size is not None and not (is_whole(size) and 1 <= size <= MAX_CHUNK_RECORDS):
            raise SettingsError(f"chunk_size {size!r} is not a whole number between 1 and {MAX_CHUNK_RECORDS}")
        if ttl is not None and not ((is_whole(ttl) or isinstance(ttl, float)) and 1 <= ttl <= MAX_TTL_S):
            raise SettingsError(f"ttl {ttl!r} is not between 1 and {MAX_TTL_S:.0f} seconds")


def is_whole(value: object) -> bool:
    """Whether a value is an integer, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def parse_budget(max_errors: int | str | None, name: str = "max_errors") -> tuple[int | None, float | None]:
    """A budget of records as their number and as a share of them, with None for the one that is not given; raises
    SettingsError, which names the option, if it is neither."""
    if max_errors is None:
        return None, None
    text = str(max_errors)
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
            if 0 <= share <= 1:
                return None, share
        elif int(text) >= 0:
            return int(text), None
    except ValueError:
        pass
    raise SettingsError(f"{name} {max_errors!r} is neither a number of records such as 100 nor a share such as 1%")


def _check_length(name: str, text: str | None, most: int) -> None:
    """Refuse a value that is not text or too long, because it is stored with the job."""
    if not isinstance(text, str | None):
        raise SettingsError(f"{name} is {kind_of(text)}, not a string")
    try:
        size = len((text or "").encode())
    except UnicodeEncodeError:
        raise SettingsError(f"{name} is not valid UTF-8") from None
    if size > most:
        raise SettingsError(f"{name} is {size:,} bytes long, and the maximum is {most:,}: shorten it")


def _check_prompt_name(name: str | None, prompt: str | None) -> None:
    """Refuse a name that can be none, and a name beside a prompt."""
    _check_length("prompt_name", name, MAX_PROMPT_NAME)
    if name == "":
        raise SettingsError("prompt_name is empty: name one of the model's prompts, or leave it out")
    if name is not None and prompt is not None:
        raise SettingsError("prompt and prompt_name would both be put before the text: leave one of them out")
