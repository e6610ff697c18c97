"""What can be configured: every setting with its type, default and one line of explanation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
LogLevel = Literal["debug", "info", "warning", "error"]
HashAlgoChoice = Literal["auto", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]

_SECRET = {"secret": True}
ENV_PREFIX = "MOONGATE_"


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file. Its repr masks secrets, so that it may be logged."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.masked()!r})"

    def masked(self) -> dict[str, Any]:
        """As plain values; a secret that is set shows as ***."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        for key in keys_of(type(self)):
            if not key.secret:
                continue
            *path, last = key.name.split(".")
            table = document
            for part in path:
                table = table[part]
            if table[last]:
                table[last] = "***"
        return document


class Server(Section, frozen=True):
    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port to listen on; 0 takes a free one.")] = 8000
    log_level: Annotated[LogLevel, Meta(description="Least severe log records to show.")] = "info"


class Admin(Section, frozen=True):
    token: Annotated[
        str,
        Meta(
            extra=_SECRET,
            description="Token of the admin API. Empty: one is made at start, printed once, "
            "and admin answers to this machine only.",
        ),
    ] = ""
    port: Annotated[Port, Meta(description="A port of its own for admin; 0 serves it on `server.port`.")] = 0


class Auth(Section, frozen=True):
    api_keys_file: Annotated[
        str,
        Meta(
            description="File with one client key a line, read at start; `name=` and `tenant=` may follow "
            "it. Empty: clients need none."
        ),
    ] = ""


class Workers(Section, frozen=True):
    urls: Annotated[
        list[str], Meta(description="Base URLs of the workers; more can be added while running.")
    ] = []
    api_key: Annotated[
        str, Meta(extra=_SECRET, description="Key the workers expect. Clients' own keys never reach them.")
    ] = ""
    ca_file: Annotated[
        str,
        Meta(
            description="PEM file with the authorities that https:// workers' certificates are verified by, "
            "and no others, read again when it changes; empty: those that this system trusts."
        ),
    ] = ""
    health_interval_s: Annotated[float, Meta(gt=0, description="Seconds between two probes of a worker.")] = (
        1.0
    )
    health_timeout_s: Annotated[float, Meta(gt=0, description="Seconds a probe may take.")] = 2.0
    breaker_failures: Annotated[
        Count, Meta(description="Turns failed in a row after which a worker gets none for a while; 0: never.")
    ] = 5
    breaker_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of its last 20 turns (10 at least) that were failed at which a worker gets "
            "none for a while; 0: never.",
        ),
    ] = 0.5
    breaker_open_s: Annotated[
        float, Meta(gt=0, description="Seconds until such a worker is tried with one turn.")
    ] = 10.0
    ramp_s: Annotated[
        Seconds, Meta(description="Seconds in which a worker that came back gets more and more; 0: at once.")
    ] = 10.0
    kv_events: Annotated[bool, Meta(description="Follow the workers' KV events.")] = True
    segments: Annotated[
        dict[str, str],
        Meta(
            description="A worker's own pool segment, `IP:PORT` or `IP` (all of that host), by its URL or "
            "name. Without it, a worker that is alone on its host has the segments of that host."
        ),
    ] = {}
    prefill: Annotated[
        list[str], Meta(description="Workers, by URL or name, whose role is to compute prompts only.")
    ] = []
    decode: Annotated[
        list[str], Meta(description="Workers, by URL or name, whose role is to decode only.")
    ] = []


class ModelSettings(Section, frozen=True):
    tokenizer: Annotated[
        str, Meta(description="Directory or name of the tokenizer; empty: the path the worker reports.")
    ] = ""
    hash_algo: Annotated[
        HashAlgoChoice, Meta(description="The workers' prefix-caching hash; auto: as they report it.")
    ] = "auto"
    hash_seed: Annotated[
        str, Meta(description="The workers' PYTHONHASHSEED text; auto: found from their events.")
    ] = "auto"
    block_size: Annotated[Count, Meta(description="Tokens in a KV block; 0: as the worker reports it.")] = 0
    aliases: Annotated[list[str], Meta(description="Other names that clients may call this model by.")] = []
    cache_prefix: Annotated[
        str, Meta(description="The store connector's `cache_prefix` of this model's pool keys.")
    ] = ""
    pool_namespace: Annotated[
        str,
        Meta(
            pattern="^(@[^,]+)?$",
            description="What follows the model's name in its pool keys, for workers with `store_tp_size` or "
            "`enable_store_tp_lcm`: `@store_tp:...@store_pp:...@store_format:...`, verbatim.",
        ),
    ] = ""
    pool_ranks: Annotated[
        dict[Literal["tp", "pp", "pcp", "dcp"], Annotated[int, Meta(ge=1, le=1024)]],
        Meta(
            description="Ranks with objects of their own for each block in the pool, by kind: `tp`, `pp`, "
            "`pcp`, `dcp`; those left out are 1. Empty: read off stored blocks."
        ),
    ] = {}
    pool_groups: Annotated[
        dict[Annotated[str, Meta(pattern="^[0-9]{1,3}$")], Count],
        Meta(
            description="KV groups of this model in the pool, by number: tokens of a sliding window, 0 for "
            "full attention. Empty: as workers' events show them."
        ),
    ] = {}


class PromptSettings(Section, frozen=True):
    cache_bytes: Annotated[
        Count,
        Meta(
            description="Memory for the text and tokens of conversations seen before, per model; a quarter "
            "as much for their bodies, all models together."
        ),
    ] = 256 << 20
    threads: Annotated[int, Meta(ge=1, description="Threads that tokenize long new prompts, per model.")] = 1

    source: Annotated[
        Literal["auto", "local", "remote", "off"],
        Meta(
            description="Where prompts are rendered: here (local), by a worker (remote), here as long as "
            "checks against the workers hold (auto), or nowhere: turns are placed without them (off)."
        ),
    ] = "auto"
    audit_fraction: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of turns whose prompt is checked against a worker's; in the long run one a "
            "second at most.",
        ),
    ] = 0.01
    forward_tokens: Annotated[
        bool, Meta(description="Send workers the token ids of prompts, where checks proved them equal.")
    ] = True


class Rates(Section, frozen=True):
    """Priors: `policies.rates` says where the figures come from."""

    prefill_tokens_per_s: Annotated[
        float, Meta(gt=0, description="Prompt tokens a worker computes a second.")
    ] = 20480.0
    growth_per_1k: Annotated[
        float,
        Meta(ge=0, description="How much dearer each 1,000 tokens of context make a token, as a share."),
    ] = 0.01
    own_tokens_per_s: Annotated[
        float, Meta(gt=0, description="Tokens a worker pulls a second from its own segment of the pool.")
    ] = 150_000.0
    remote_tokens_per_s: Annotated[
        float, Meta(gt=0, description="Tokens it pulls a second from other segments.")
    ] = 77_000.0
    disk_tokens_per_s: Annotated[float, Meta(gt=0, description="Tokens it pulls a second from disks.")] = (
        25_000.0
    )
    first_step_ms: Annotated[float, Meta(gt=0, description="Milliseconds that every turn takes besides.")] = (
        20.0
    )
    decode_ms: Annotated[
        float, Meta(ge=0, description="Milliseconds that each turn which decodes adds to a step.")
    ] = 0.7


class Routing(Section, frozen=True):
    policy: Annotated[str, Meta(description="Name of the routing policy.")] = "expected_ttft"
    headers: Annotated[
        Literal["off", "debug"],
        Meta(description="debug: every answer carries the `x-moongate-*` headers of its decision."),
    ] = "off"
    options: Annotated[dict[str, Any], Meta(description="Options of the policy.")] = {}
    rates: Rates = Rates()
    policy_path: Annotated[
        str,
        Meta(
            description="File in which policies set through the admin API outlive a restart, with their "
            "history; empty: they don't."
        ),
    ] = ".moongate/policy.json"
    decision_log_path: Annotated[
        str,
        Meta(
            description="File that gets a JSON line for each decision, for `moongate replay --decisions`; "
            "empty: none. Holds no prompts and no keys."
        ),
    ] = ""
    decision_log_bytes: Annotated[
        int,
        Meta(
            ge=1 << 16,
            description="Size at which that file is put aside, as `.1` in place of the one before.",
        ),
    ] = 256 << 20


class Index(Section, frozen=True):
    snapshot_path: Annotated[
        str,
        Meta(
            description="File in which the index outlives a restart of the gateway; empty: it doesn't. "
            "Holds block hashes, no prompts."
        ),
    ] = ".moongate/index.snapshot"
    snapshot_interval_s: Annotated[float, Meta(gt=0, description="Seconds between two snapshots.")] = 10.0
    memory_bytes: Annotated[
        Count,
        Meta(
            description="Memory for the index; beyond it the blocks used least recently are given up. "
            "0: no limit. About 120 bytes a block."
        ),
    ] = 1 << 30
    doubtful_share: Annotated[
        float,
        Meta(ge=0, le=1, description="How much of a worker's blocks counts while they are not proven."),
    ] = 0.5
    probes_per_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Probes a second, at most, that find out what workers hold whose KV events were "
            "missed for good: the beginnings of recent prompts, for one token each. 0: none.",
        ),
    ] = 1.0


class Mooncake(Section, frozen=True):
    master: Annotated[
        str,
        Meta(
            pattern=r"^([^/\s]+:[0-9]{1,5})?\Z",
            description="HOST:PORT of the Mooncake master, as the workers use it. Empty: no pool.",
        ),
    ] = ""
    http_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)], Meta(description="Port of the master's admin HTTP.")
    ] = 9003
    budget_ms: Annotated[
        float, Meta(gt=0, description="Milliseconds a turn waits for the pool before it goes without.")
    ] = 5.0
    lookup: Annotated[
        Literal["http", "rpc"],
        Meta(
            description="How the pool is asked for blocks: through the master's HTTP, or by the store "
            "client, which is faster and keeps what it asked for from eviction for the master's lease."
        ),
    ] = "http"
    remove_dead: Annotated[
        bool,
        Meta(
            description="Take objects that only a dead worker's memory held out of the pool when a turn "
            "needs them: engines then compute at once instead of trying to load them."
        ),
    ] = True
    events: Annotated[
        str,
        Meta(
            pattern=r"^(tcp://[^/\s]+:[0-9]{1,5})?\Z",
            description="Where the master publishes KV events of its own, `tcp://HOST:PORT`: its "
            "`kv_events_bind_endpoint`, as reached from here. Empty: not followed.",
        ),
    ] = ""


class Timeouts(Section, frozen=True):
    connect_s: Annotated[float, Meta(gt=0, description="Seconds to connect to a worker.")] = 2.0
    # This and `between_chunks_s` are as long as openai's and anthropic's SDKs wait: who gives up sooner makes
    # them ask again for what is being computed.
    first_byte_s: Annotated[
        Seconds,
        Meta(
            description="Seconds until an answer begins, all tries together; one that is not streamed begins "
            "when it is complete; 0: no limit."
        ),
    ] = 600.0
    failover_s: Annotated[
        Seconds,
        Meta(
            description="Seconds until the headers of a streamed answer come, after which another worker is "
            "tried if one can take the turn, or those of an answer about a stored response (504 then); "
            "0: only workers that miss probes are given up."
        ),
    ] = 30.0
    between_chunks_s: Annotated[
        Seconds, Meta(description="Seconds between two chunks of an answer; 0: no limit.")
    ] = 600.0
    head_s: Annotated[
        Seconds, Meta(description="Seconds from a request's first byte to the end of its head; 0: no limit.")
    ] = 30.0
    body_s: Annotated[
        Seconds, Meta(description="Seconds between two pieces of a request's body; 0: no limit.")
    ] = 60.0
    keep_alive_s: Annotated[
        Seconds,
        Meta(description="Seconds of silence after which an event stream gets a comment; 0: none ever."),
    ] = 0.0
    stall_s: Annotated[
        Seconds,
        Meta(
            description="Seconds a client may take nothing of its answer before it is cut off; 0: no limit."
        ),
    ] = 60.0
    total_s: Annotated[Seconds, Meta(description="Seconds for a whole turn; 0: no limit.")] = 0.0
    drain_delay_s: Annotated[
        Seconds,
        Meta(description="Seconds after SIGTERM in which `/ready` says 503 and turns are still taken."),
    ] = 3.0
    drain_s: Annotated[Seconds, Meta(description="Seconds that turns under way then have to end.")] = 30.0


class Limits(Section, frozen=True):
    """What is beyond the first four is refused with 429; a turn is never refused for being large alone."""

    requests: Annotated[Count, Meta(description="Turns under way in all; 0: no limit.")] = 0
    tokens: Annotated[
        Count, Meta(description="Uncached prompt tokens waiting for their first token in all; 0: no limit.")
    ] = 0
    worker_requests: Annotated[
        Count, Meta(description="Turns under way on one worker (or data-parallel rank); 0: no limit.")
    ] = 0
    worker_tokens: Annotated[
        Count, Meta(description="Uncached prompt tokens waiting on one worker (or rank); 0: no limit.")
    ] = 0
    max_body_bytes: Annotated[
        Count, Meta(description="Largest request body, and most that a client may send ahead; 0: no limit.")
    ] = 64 << 20
    tries: Annotated[
        int, Meta(ge=1, description="Workers tried for one turn before anything was answered.")
    ] = 3
    stored_responses: Annotated[
        int, Meta(ge=1, description="Stored responses whose worker is remembered; the oldest go first.")
    ] = 65_536
    stored_responses_s: Annotated[
        float, Meta(gt=0, description="Seconds for which a stored response that nobody uses is remembered.")
    ] = 86_400.0


class Settings(Section, frozen=True):
    """The whole configuration. Every leaf is used by something; see `docs/configuration.md`."""

    server: Server = Server()
    admin: Admin = Admin()
    auth: Auth = Auth()
    workers: Workers = Workers()
    models: dict[str, ModelSettings] = {}
    prompt: PromptSettings = PromptSettings()
    routing: Routing = Routing()
    index: Index = Index()
    mooncake: Mooncake = Mooncake()
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: `name` is dotted, `type` a type form, `models.*.x` stands for any model's x."""

    name: str
    type: Any
    default: Any
    description: str
    secret: bool

    @property
    def env(self) -> str:
        """Its environment variable; "" for those of a named model, whose names fit no variable."""
        if "*" in self.name:
            return ""
        return ENV_PREFIX + self.name.replace(".", "__").upper()

    @property
    def allowed(self) -> str:
        """The type and its bounds in words."""
        return _in_words(self.type)


def keys() -> list[Key]:
    """Every setting, in the order of the file."""
    return list(keys_of(Settings))


def keys_of(struct: type[Section], prefix: str = "") -> Iterator[Key]:
    """The settings of one table and those below it."""
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        name = prefix + field.name
        form = hints[field.name]
        if isinstance(form, type) and issubclass(form, Section):
            yield from keys_of(form, name + ".")
        elif form == dict[str, ModelSettings]:
            yield from keys_of(ModelSettings, name + ".*.")
        else:
            metas = _metas(form)
            yield Key(
                name,
                form,
                getattr(struct(), field.name),
                next((meta.description for meta in metas if meta.description), ""),
                any("secret" in (meta.extra or {}) for meta in metas),
            )


def plain(form: Any) -> Any:
    """A type form without its constraints."""
    while hasattr(form, "__metadata__"):
        form = form.__origin__
    return form


_WORDS = {str: "text", int: "integer", float: "number", bool: "true or false"}


def _metas(form: Any) -> list[Meta]:
    return [] if not hasattr(form, "__metadata__") else [*_metas(form.__origin__), *form.__metadata__]


def _in_words(form: Any) -> str:
    kind = plain(form)
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    name = f"list of {_WORDS[get_args(kind)[0]]}" if get_origin(kind) is list else _WORDS.get(kind, "table")
    bounds = [
        f"{sign} {limit}"
        for meta in _metas(form)
        for sign, limit in ((">=", meta.ge), (">", meta.gt), ("<=", meta.le))
        if limit is not None
    ]
    return f"{name} {' and '.join(bounds)}".strip()
