"""A worker's command line: what fits together starts, what does not says why."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoints import make_checkpoint
from tpla.core.checkpoint import Manifest, fingerprint
from tpla.core.config import Mode, Role, Transfer, parse_worker_config
from tpla.core.config.environment import NCCL_TRANSFER, SGLANG_TIERED_PREFILL_CACHE
from tpla.core.errors import CheckpointError, ConfigError
from tpla.core.latent_layout import KVFormat, ModelPlan, PVFormat
from tpla.workers import launch_cli, ports
from tpla.workers.deployment import (
    REFERENCE_MODEL,
    DeploymentOptions,
    DeploymentPlan,
    plan_deployment,
)
from tpla.workers.devices import gpu_count
from tpla.workers.launch import WorkerOptions, configure, environment_for
from tpla.workers.ports import free_ports
from tpla.workers.sglang_arguments import sglang_command_line


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    return describe(directory, of=directory)


def describe(directory: Path, of: Path) -> Path:
    """Make a checkpoint the conversion of one, itself or another."""
    scales = [[[1.0, 1.0]] * 4] * 2
    marks = fingerprint(directory), fingerprint(of)
    facts = {"path": "text.txt"}
    Manifest(ModelPlan(64, 2, (0, 0)), "identity", "one", scales, [], *marks, facts).save(directory)
    return directory


def options(model: Path, **changes: Any) -> WorkerOptions:
    values: dict[str, Any] = {
        "role": Role.DECODE, "model": model, "mode": Mode.TPLA, "groups": None, "kv_format": None,
        "pv_format": "fp16", "scatter_output": None, "transfer": "zmq", "transfer_timeout": 30.0,
        "device": "cpu", "fault": None,
        "sglang_arguments": ("--tp-size", "2"),
    }  # fmt: skip
    return WorkerOptions(**{**values, **changes})


def test_groups_come_from_the_checkpoint_and_rows_are_fp8(converted: Path) -> None:
    config = configure(options(converted))
    assert config.groups == 2 and config.kv_format is KVFormat.FP8


@pytest.mark.parametrize(
    ("changes", "scatters"),
    [
        ({}, True),
        ({"scatter_output": False}, False),
        ({"mode": Mode.SNAPMLA}, False),
        ({"role": Role.PREFILL}, False),
    ],
)
def test_latent_groups_are_added_up_before_o_proj_unless_refused(
    converted: Path, changes: dict[str, Any], scatters: bool
) -> None:
    assert configure(options(converted, **changes)).scatter_output is scatters


@pytest.mark.parametrize("mode", [Mode.TPLA, Mode.SNAPMLA])
def test_p_v_is_in_fp16_unless_asked_otherwise(converted: Path, mode: Mode) -> None:
    assert configure(options(converted, mode=mode)).pv_format is PVFormat.FP16
    assert configure(options(converted, mode=mode, pv_format="fp8")).pv_format is PVFormat.FP8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"groups": 4}, "converted for 2"),
        ({"sglang_arguments": ("--tp-size", "3")}, "not a multiple of 2"),
        ({"sglang_arguments": ("--tp-size=none",)}, "not a whole number of 1 or more"),
        ({"sglang_arguments": ("--allow-auto-truncate",)}, "--allow-auto-truncate: "),
        ({"sglang_arguments": ("--tokenizer-worker-num", "2")}, "--tokenizer-worker-num: "),
        ({"sglang_arguments": ("--config", "flags.yaml")}, "write them on the command line"),
        ({"sglang_arguments": ("--config=auto",)}, "write them on the command line"),
        ({"sglang_arguments": ("--tp-size=2", "--tensor-parallel-size", "3")}, "not a multiple"),
        ({"sglang_arguments": ("--dcp-size=1", "--dcp-size=2")}, "divided by latent dims"),
        ({"sglang_arguments": ("--enable-lora",)}, "--enable-lora: .* no adapter is added"),
        ({"sglang_arguments": ("--lora-paths", "auto")}, "--lora-paths: .* merged into"),
        (
            {"role": Role.PREFILL, "sglang_arguments": ("--lora-paths=a=b",)},
            "--lora-paths: .* merged into",
        ),
        ({"role": Role.PREFILL, "sglang_arguments": ("--enable-lora",)}, "--enable-lora: "),
        ({"sglang_arguments": ("--model-path=/other",)}, "--model-path: .* use that alone"),
        ({"sglang_arguments": ("--disaggregation-mode", "null")}, "--disaggregation-mode: "),
        (
            {"role": Role.PREFILL, "sglang_arguments": ("--disaggregation-transfer-backend=nixl",)},
            "--disaggregation-transfer-backend: .* use --transfer",
        ),
        ({"sglang_arguments": ("--attention-backend", "triton")}, "--attention-backend: "),
        (
            {"sglang_arguments": ("--decode-attention-backend=fa3",)},
            "--decode-attention-backend: .* leave it out",
        ),
        ({"sglang_arguments": ("--attn-cp-size", "2")}, "--attn-cp-size: .* no prompts"),
        ({"sglang_arguments": ("--enable-prefill-cp",)}, "--enable-prefill-cp: .* no prompts"),
        ({"sglang_arguments": ("--enable-hierarchical-cache",)}, "knows SGLang's own rows alone"),
        (
            {"sglang_arguments": ("--disaggregation-decode-enable-radix-cache",)},
            "prefill caches prefixes",
        ),
        ({"sglang_arguments": ("--enable-memory-saver",)}, "cannot release TPLA's pool"),
        ({"sglang_arguments": ("--dcp-size=2",)}, "divided by latent dims"),
        (
            {"role": Role.PREFILL, "sglang_arguments": ("--dcp-size", "2")},
            "--dcp-size: pages are migrated as whole ones",
        ),
        (
            {
                "role": Role.PREFILL,
                "sglang_arguments": ("--dcp-size=1", "--decode-context-parallel-size=2"),
            },
            "--decode-context-parallel-size: ",
        ),
        ({"sglang_arguments": ("--kv-cache-dtype", "fp8_e4m3")}, "use that"),
        (
            {"role": Role.PREFILL, "sglang_arguments": ("--kv-cache-dtype", "fp8_e4m3")},
            "prefill is exact",
        ),
        ({"sglang_arguments": ("--tp-size=2", "--enable-dp-attention")}, "no CPU form"),
        ({"mode": Mode.SNAPMLA, "groups": 2}, "use groups=1"),
        ({"mode": Mode.SNAPMLA, "kv_format": "bf16"}, "use mode mla"),
        ({"mode": Mode.MLA, "kv_format": "fp8"}, "use bf16, fp32 or mode snapmla"),
        ({"mode": Mode.SNAPMLA, "scatter_output": True}, "leave --scatter-output out"),
        ({"kv_format": "int4"}, "kv_format='int4'"),
        ({"pv_format": "bf16"}, "pv_format='bf16'"),
        ({"pv_format": "fp8", "kv_format": "bf16"}, "leave --pv-format out"),
        ({"pv_format": "fp8", "mode": Mode.MLA}, "kv_format=bf16; leave --pv-format out"),
        ({"transfer": "rdma"}, "transfer='rdma'"),
        ({"transfer": "nccl"}, "use --transfer zmq, or --device cuda"),
        ({"transfer_timeout": 0.0}, "greater than 0"),
        ({"fault": "explode"}, "fault.kind='explode'"),
        ({"device": "tpu"}, "use auto, cpu or cuda"),
    ],
)
def test_values_that_do_not_fit_are_refused(
    converted: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        configure(options(converted, **changes))


@pytest.mark.parametrize(
    "flags",
    [
        ("--tokenizer-worker-num", "1"),
        ("--dcp-size=1", "--attn-cp-size=1"),
        ("--kv-cache-dtype=auto",),
        ("--disaggregation-transfer-backend", "fake"),  # as benchmarks time a decode worker alone
        ("--tp-size=3", "--tp", "2"),  # the last one counts
    ],
)
def test_flags_that_change_nothing_are_taken(converted: Path, flags: tuple[str, ...]) -> None:
    assert configure(options(converted, sglang_arguments=("--tp-size=2", *flags))).groups == 2


def test_prefill_runs_the_attention_that_it_is_told_to(converted: Path) -> None:
    flags = ("--attention-backend", "triton")
    config = configure(options(converted, role=Role.PREFILL, sglang_arguments=flags))
    assert config.role is Role.PREFILL


def test_a_worker_alone_chooses_the_transfer_that_reaches_any_host(converted: Path) -> None:
    assert configure(options(converted, transfer="auto")).transfer is Transfer.ZMQ


def test_an_unconverted_checkpoint_says_how_to_convert_it(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="tpla convert"):
        configure(options(plain))
    assert configure(options(plain, mode=Mode.SNAPMLA)).groups == 1


def test_other_weights_than_the_manifest_describes_are_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    Manifest(ModelPlan(64, 2, (0, 0)), "pca", "one", [], [], "0" * 64, "0" * 64).save(model)
    with pytest.raises(CheckpointError, match="convert the model again"):
        configure(options(model))


def test_the_users_sglang_flags_win_over_our_defaults(converted: Path) -> None:
    config = configure(options(converted))
    line = sglang_command_line(config, ("--host", "0.0.0.0", "--dtype=bfloat16"))
    assert line.count("--host") == 1 and "127.0.0.1" not in line
    assert "--dtype=bfloat16" in line and "float32" not in line
    assert line[line.index("--disaggregation-mode") + 1] == "decode"


def test_the_configuration_survives_the_way_to_the_ranks(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpla.core.config import worker_config_from_environment

    config = configure(options(converted, fault="flip:after=3"))
    for name, value in environment_for(config).items():
        monkeypatch.setenv(name, value)
    assert worker_config_from_environment() == config


def test_only_workers_over_nccl_keep_torchs_watchdog_from_ending_them(converted: Path) -> None:
    over_zmq = configure(options(converted))
    over_nccl = over_zmq.model_copy(update={"transfer": Transfer.NCCL, "device": "cuda"})
    assert not NCCL_TRANSFER.keys() & environment_for(over_zmq).keys()
    assert NCCL_TRANSFER.items() <= environment_for(over_nccl).items()


def deployment(tmp_path: Path, **changes: Any) -> DeploymentOptions:
    values: dict[str, Any] = {
        "prefill": 2, "decode": 4, "model": tmp_path, "mode": Mode.SNAPMLA, "groups": 1,
        "core_dims": None, "kv_format": None, "transfer": "zmq", "transfer_timeout": 30.0,
        "prefill_tp": 1, "decode_tp": 2, "host": "127.0.0.1", "port": 8000,
        "state": tmp_path / "state", "calibration": None, "gpus": 0,
    }  # fmt: skip
    return DeploymentOptions(**{**values, **changes})


@pytest.mark.parametrize(
    ("arguments", "late"),
    [
        ((), False),
        (("--enable-hierarchical-cache",), True),
        (("--enable-lmcache",), True),
        (("--radix-cache-backend=mine",), True),
    ],
)
def test_prefixes_that_may_be_on_their_way_from_a_host_are_not_sent_early(
    converted: Path, arguments: tuple[str, ...], late: bool
) -> None:
    roles = (Role.PREFILL, Role.DECODE)
    prefill, decode = (configure(options(converted, role=role, mode=Mode.MLA)) for role in roles)
    wanted = SGLANG_TIERED_PREFILL_CACHE.items()
    assert (wanted <= environment_for(prefill, arguments).items()) == late
    assert not wanted <= environment_for(decode, arguments).items()


def test_ranks_are_divided_into_workers_that_the_router_knows(tmp_path: Path) -> None:
    plan = plan_deployment(deployment(tmp_path))
    names = [worker.name for worker in plan.workers]
    assert names == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    for worker in plan.workers:
        url = worker.ready_url.removesuffix("/health")
        assert url in plan.router.command


def test_each_rank_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    plan = plan_deployment(deployment(tmp_path, gpus=8))
    first = {
        worker.name: worker.command[worker.command.index("--base-gpu-id") + 1]
        for worker in plan.workers
    }
    assert first == {"prefill-0": "0", "prefill-1": "1", "decode-0": "2", "decode-1": "4"}


def test_the_embedded_model_is_prefilled_exactly_on_gpus(tmp_path: Path) -> None:
    own = plan_deployment(deployment(tmp_path, gpus=8)).workers[0]
    embedded = plan_deployment(deployment(tmp_path, gpus=8, model=REFERENCE_MODEL)).workers
    assert "--attention-backend" not in own.command
    assert [
        worker.command[worker.command.index("--attention-backend") + 1]
        for worker in embedded
        if "--attention-backend" in worker.command
    ] == ["tpla_torch", "tpla_torch"]


def test_the_embedded_model_has_cores_of_its_own_and_other_models_have_one(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"mode": Mode.TPLA, "groups": 2, "calibration": tmp_path / "text"}
    layers = json.loads((REFERENCE_MODEL / "config.json").read_text())["num_hidden_layers"]
    embedded = plan_deployment(deployment(tmp_path, model=REFERENCE_MODEL, **changes))
    core_dims = _core_dims(embedded)
    assert len(core_dims.split(",")) == layers
    assert embedded.model.name == f"tpla-reference-g2-core{core_dims.replace(',', '-')}"
    assert _core_dims(plan_deployment(deployment(tmp_path, **changes))) == "32"
    asked = deployment(tmp_path, model=REFERENCE_MODEL, core_dims="16", **changes)
    assert _core_dims(plan_deployment(asked)) == "16"


def _core_dims(plan: DeploymentPlan) -> str:
    (command,) = plan.conversion
    return command[command.index("--core-dims") + 1]


def test_cores_of_many_layers_do_not_make_a_name_that_no_folder_can_have(tmp_path: Path) -> None:
    def folder(core_dims: str) -> Path:
        changes = {"mode": Mode.TPLA, "groups": 2, "model": REFERENCE_MODEL}
        return plan_deployment(deployment(tmp_path, core_dims=core_dims, **changes)).model

    many = [",".join(["0"] * 60 + [last]) for last in ("32", "64")]
    assert folder("0,32").name == "tpla-reference-g2-core0-32"
    assert len(folder(many[0]).name) < 60 and folder(many[0]) != folder(many[1])


def test_flags_reach_the_workers_of_their_role(tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "sglang_arguments": ("--page-size", "1"),
        "prefill_arguments": ("--attention-backend", "triton"),
        "decode_arguments": ("--no-scatter-output",),
    }
    for worker in plan_deployment(deployment(tmp_path, **flags)).workers:
        prefills = worker.name.startswith("prefill")
        assert "--page-size" in worker.command
        assert ("--attention-backend" in worker.command) is prefills
        assert ("--no-scatter-output" in worker.command) is not prefills


def test_keys_and_other_flags_of_the_router_reach_the_router_alone(tmp_path: Path) -> None:
    key = ("--api-key", "secret")
    for changes in ({"sglang_arguments": key}, {"decode_arguments": key}):
        with pytest.raises(ConfigError, match="TPLA_API_KEY"):
            plan_deployment(deployment(tmp_path, **changes))
    plan = plan_deployment(deployment(tmp_path, router_arguments=key))
    assert plan.router.command[-2:] == key
    assert not any("--api-key" in worker.command for worker in plan.workers)


def test_replicas_meet_at_ports_that_sglang_holds_for_them(tmp_path: Path) -> None:
    replicas = ("--dp-size", "2")
    plan = plan_deployment(deployment(tmp_path, decode_arguments=replicas))
    held = {worker.name: "--nccl-port" in worker.command for worker in plan.workers}
    assert all(is_held is name.startswith("prefill") for name, is_held in held.items())
    config = parse_worker_config({"role": "decode", "model": "m", "mode": "mla",
                                  "kv_format": "bf16", "instance_id": "i"})  # fmt: skip
    assert "--nccl-port" not in sglang_command_line(config, replicas)
    assert "--nccl-port" in sglang_command_line(config, (*replicas, "--enable-dp-attention"))


def test_a_conversion_of_another_model_is_not_served_in_its_place(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"mode": Mode.TPLA, "groups": 2, "core_dims": "0"}
    first, other = (make_checkpoint(tmp_path / name / "m", seed=i) for i, name in enumerate("ab"))
    text = tmp_path / "text.txt"
    plan = plan_deployment(deployment(tmp_path, model=first, calibration=text, **changes))
    assert "float32" not in plan.conversion[0]
    describe(make_checkpoint(plan.model), of=first)
    again = plan_deployment(deployment(tmp_path, model=first, calibration=text, **changes))
    assert again.model == plan.model and not again.conversion
    longer = deployment(tmp_path, model=first, calibration=tmp_path / "longer.txt", **changes)
    with pytest.raises(CheckpointError, match=r"calibrated on text\.txt, not on .*longer\.txt"):
        plan_deployment(longer)
    with pytest.raises(CheckpointError, match="converted from another checkpoint"):
        plan_deployment(deployment(tmp_path, model=other, calibration=text, **changes))


def test_a_bootstrap_port_that_another_worker_has_is_refused(converted: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [*(sys.executable, "-m", "tpla.core.cli", "worker", "prefill"),
                   *("--model", str(converted), "--device", "cpu"),
                   *("--disaggregation-bootstrap-port", port)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert f"--disaggregation-bootstrap-port {port} at 127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="4 are visible"):
        plan_deployment(deployment(tmp_path, gpus=4))


@pytest.mark.skipif(gpu_count() > 0, reason="needs a host without a GPU")
def test_a_gpu_that_is_not_there_is_refused(converted: Path) -> None:
    with pytest.raises(ConfigError, match="no GPU is visible"):
        configure(options(converted, device="cuda"))
    assert configure(options(converted, device="auto")).device == "cpu"


def test_a_gpu_decode_worker_runs_our_backend_on_pages_that_its_kernels_like(
    converted: Path,
) -> None:
    config = configure(options(converted)).model_copy(update={"device": "cuda"})
    line = sglang_command_line(config, ())
    for flag, value in (("--attention-backend", "tpla"), ("--page-size", "64")):
        assert line[line.index(flag) + 1] == value
    prefill = config.model_copy(update={"role": Role.PREFILL})
    assert "--attention-backend" not in sglang_command_line(prefill, ())


@pytest.mark.parametrize(
    ("ranks", "words"), [(("2", "2"), "not a multiple of 2"), (("4", "3"), "--dp-size 3")]
)
def test_groups_must_fit_the_ranks_of_one_data_parallel_rank(
    converted: Path, monkeypatch: pytest.MonkeyPatch, ranks: tuple[str, str], words: str
) -> None:
    monkeypatch.setattr("tpla.workers.launch.resolve_device", lambda asked: "cuda")
    tp_size, dp_size = ranks
    flags = ("--enable-dp-attention", "--tp-size", tp_size, "--dp-size", dp_size)
    with pytest.raises(ConfigError, match=words):
        configure(options(converted, sglang_arguments=flags))
    fitting = ("--enable-dp-attention", "--tp-size", "4", "--dp-size", "2")
    assert configure(options(converted, sglang_arguments=fitting)).groups == 2


@pytest.mark.parametrize(
    ("transfer", "gpus", "chosen"),
    [("auto", 0, "zmq"), ("auto", 8, "nccl"), ("zmq", 8, "zmq"), ("nccl", 8, "nccl")],
)
def test_a_deployment_on_gpus_transfers_between_them(
    tmp_path: Path, transfer: str, gpus: int, chosen: str
) -> None:
    plan = plan_deployment(deployment(tmp_path, transfer=transfer, gpus=gpus))
    for worker in plan.workers:
        assert worker.command[worker.command.index("--transfer") + 1] == chosen


def test_every_process_has_ports_of_its_own(tmp_path: Path) -> None:
    plan = plan_deployment(deployment(tmp_path))
    flags = ("--port", "--nccl-port", "--disaggregation-bootstrap-port")
    chosen = [
        command[index + 1]
        for command in (worker.command for worker in plan.workers)
        for index, argument in enumerate(command)
        if argument in flags
    ]
    assert len(chosen) == 10 and len(set(chosen)) == 10


def test_ports_are_not_those_of_outgoing_connections() -> None:
    lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = free_ports(200)
    assert len(set(found)) == 200 and max(found) < lowest_outgoing


def test_a_port_that_is_bound_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        monkeypatch.setattr(ports, "_RANGE", (port, port + 1))
        monkeypatch.setattr(ports, "_OUTGOING", Path("/nowhere"))
        with pytest.raises(ConfigError, match="only 0 of 1 TCP ports"):
            free_ports(1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decode": 3}, "multiple of 2"),
        ({"prefill": 0}, "--prefill 0"),
        ({"mode": Mode.TPLA, "groups": 4}, "not a multiple of --groups 4"),
    ],
)
def test_impossible_deployments_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_deployment(deployment(tmp_path, **changes))


def test_a_conversion_alone_prints_the_checkpoint_and_starts_nothing(
    converted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch_cli, "_run", lambda *_: pytest.fail("a process would be started"))
    words = ["--convert-only", "--device", "cpu", "--state", str(tmp_path), "--model"]
    monkeypatch.setattr(sys, "argv", ["tpla launch", *words, str(converted)])
    with pytest.raises(SystemExit) as end:
        launch_cli.launch()
    assert end.value.code == 0 and capsys.readouterr().out == f"{converted}\n"


def test_flags_that_a_launch_does_not_know_reach_every_worker(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[DeploymentPlan] = []
    monkeypatch.setattr(launch_cli, "_run", lambda _, plan, __: plans.append(plan))
    words = ["--mode", "snapmla", "--pv-format", "fp8", "--device", "cpu", "--state", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["tpla launch", *words, "--model", str(converted)])
    with pytest.raises(SystemExit) as end:
        launch_cli.launch()
    assert end.value.code == 0
    for worker in plans[0].workers:
        assert worker.command[worker.command.index("--pv-format") + 1] == "fp8"


def test_an_unconverted_model_of_the_users_own_needs_text(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--calibration"):
        plan_deployment(deployment(tmp_path, mode=Mode.TPLA, groups=2))
