"""The launch examples: what they would start is a world that their layout fits, for every number of machines; and two machines do start."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch.distributed.run
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import TrainerV1alpha1TrainingRuntime
from skypilot_schema import TASK

import longshift as ls
from longshift import cli
from longshift.config_file import load_config
from longshift.documents.tokenizer import train as train_tokenizer
from longshift.spec.families import PRESETS, to_hugging_face
from longshift.trainer.metrics import read_rows

REPOSITORY = Path(__file__).parents[2]
LAUNCH = REPOSITORY / "examples/launch"


@pytest.fixture
def programs(tmp_path) -> Path:
    """Programs that scripts call, which show what torchrun would be given."""
    place = tmp_path / "bin"
    place.mkdir()
    for name, body in (("torchrun", 'printf "%s\\n" "$@"'), ("srun", 'exec "$@"'), ("scontrol", "printf 'node1\\nnode2\\n'")):
        (place / name).write_text(f"#!/bin/sh\n{body}\n")
        (place / name).chmod(0o755)
    return place


def started(script: str, programs: Path, *words: str, **variables: str) -> list[str]:
    """The command line of torchrun that a script makes."""
    given = {"PATH": f"{programs}:{os.environ['PATH']}"} | variables
    done = subprocess.run(["bash", LAUNCH / script, *words], env=given, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def fits(words: list[str], place: Path, monkeypatch) -> Any:
    """torchrun's arguments, after the training command was read and its layout found to be as large as the world."""
    asked = torch.distributed.run.get_args_parser().parse_args(words)
    assert (asked.module, asked.training_script, asked.training_script_args[0]) == (True, "longshift.cli", "train")
    function, bound, _ = cli.app.parse_args(cli.words(asked.training_script_args), exit_on_error=False, print_error=False)
    assert function is cli.train
    (place / "Qwen3-0.6B").mkdir()
    (place / "Qwen3-0.6B/config.json").write_text(json.dumps(to_hugging_face(PRESETS["qwen3-0.6b"])))
    monkeypatch.chdir(place)
    config = load_config(REPOSITORY / bound.arguments["config"], bound.arguments.get("overrides", ()))
    assert config.world == int(asked.nproc_per_node) * int(asked.nnodes)
    return asked


@pytest.mark.parametrize(("nodes", "gpus"), [(None, None), ("2", None), ("4", "8"), ("3", "4")])
def test_by_hand_the_world_follows_the_machines(programs, tmp_path, monkeypatch, nodes, gpus):
    given = {name: value for name, value in (("NODES", nodes), ("GPUS", gpus), ("HEAD", "node1")) if value}
    asked = fits(started("torchrun.sh", programs, "train.lr=1e-5", **given), tmp_path, monkeypatch)
    assert (asked.nnodes, asked.nproc_per_node, asked.rdzv_endpoint) == (nodes or "1", gpus or "8", "node1:29500")
    assert asked.training_script_args[-1] == "train.lr=1e-5"


@pytest.mark.parametrize("nodes", ["2", "5"])
def test_under_slurm_the_world_follows_the_job(programs, tmp_path, monkeypatch, nodes):
    words = started("slurm.sbatch", programs, SLURM_NNODES=nodes, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node[1-2]")
    asked = fits(words, tmp_path, monkeypatch)
    assert (asked.nnodes, asked.rdzv_endpoint, asked.rdzv_id) == (nodes, "node1:29500", "7")
    assert asked.training_script_args[-1] == "--resume=auto"
    header = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", (LAUNCH / "slurm.sbatch").read_text(), re.MULTILINE))
    assert (header["gpus-per-node"], header["ntasks-per-node"], header["signal"]) == (asked.nproc_per_node, "1", "TERM@120")


def test_the_kubernetes_file_is_a_service_and_a_job_that_fit_each_other(tmp_path, monkeypatch):
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    assert (service["apiVersion"], service["kind"], service["spec"]["clusterIP"]) == ("v1", "Service", "None")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert job.keys() == service.keys() == {"apiVersion", "kind", "metadata", "spec"}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] >= 2
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["restartPolicy"] in ("Never", "OnFailure")
    (container,) = pod["containers"]
    assert {"name", "image", "command", "resources", "volumeMounts"} <= container.keys()
    assert all(isinstance(word, str) for word in container["command"])
    assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]
    assert all(mount["mountPath"].startswith("/") for mount in container["volumeMounts"])
    for name in (service["metadata"]["name"], job["metadata"]["name"], container["name"]):
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name)
    assert container["command"][0] == "torchrun"
    asked = fits(container["command"][1:], tmp_path, monkeypatch)
    assert int(asked.nnodes) == spec["completions"]
    assert int(asked.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert asked.rdzv_endpoint.partition(":")[0] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"


@pytest.mark.parametrize(("nodes", "gpus"), [("2", "8"), ("3", "4")])
def test_a_skypilot_task_keeps_its_schema_and_the_world_follows_the_machines(programs, tmp_path, monkeypatch, nodes, gpus):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    jsonschema.validate(task, TASK)
    (folder,) = task["volumes"]
    script = task["run"].replace(f"cd {folder}\n", f"cd {tmp_path}\n")
    assert script != task["run"]
    given = {"PATH": f"{programs}:{os.environ['PATH']}", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_TASK_ID": "sky-7"}
    given |= {"SKYPILOT_NUM_NODES": nodes, "SKYPILOT_NUM_GPUS_PER_NODE": gpus}
    words = subprocess.run(["bash", "-c", script], env=given, capture_output=True, text=True, check=True).stdout.splitlines()
    asked = fits(words, tmp_path, monkeypatch)
    assert (asked.nnodes, asked.nproc_per_node, asked.rdzv_endpoint, asked.rdzv_id) == (nodes, gpus, "10.0.0.1:29500", "sky-7")
    assert asked.training_script_args[-1] == "--resume=auto"


@pytest.mark.parametrize("wrong", [{"num_nodes": "2"}, {"resources": {"accelerator": "H100:8"}}, {"node": 2}])
def test_the_schema_of_skypilot_refuses_what_it_does_not_know(wrong):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load((LAUNCH / "skypilot.yaml").read_text()) | wrong, TASK)


def as_kubeflow_reads(kind: Any, given: dict) -> dict:
    """What the API's own model makes of an object, which drops keys that it does not know."""
    return kind.from_dict(given).to_dict()


def test_the_kubeflow_file_is_a_runtime_and_a_trainjob_that_keep_their_schemas_and_fit_each_other(tmp_path, monkeypatch):
    runtime, job = yaml.safe_load_all((LAUNCH / "kubeflow.yaml").read_text())
    assert as_kubeflow_reads(TrainerV1alpha1TrainingRuntime, runtime) == runtime
    assert as_kubeflow_reads(TrainerV1alpha1TrainJob, job) == job
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert runtime["apiVersion"] == job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert replicated["name"] == container["name"] == "node"  # which the job's trainer changes
    assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]
    trainer = job["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    program, *words = trainer["command"]
    monkeypatch.setenv("PET_NNODES", str(trainer["numNodes"]))  # as Kubeflow does, for torchrun
    monkeypatch.setenv("PET_NPROC_PER_NODE", str(trainer["numProcPerNode"]))
    asked = fits(words, tmp_path, monkeypatch)
    assert (program, asked.nnodes, asked.nproc_per_node) == ("torchrun", "2", "8")
    assert asked.training_script_args[-1] == "--resume=auto"


def test_the_schema_of_kubeflow_refuses_what_it_does_not_know():
    _, job = yaml.safe_load_all((LAUNCH / "kubeflow.yaml").read_text())
    job["spec"]["trainer"]["nodes"] = 2
    assert as_kubeflow_reads(TrainerV1alpha1TrainJob, job) != job
    job["spec"]["trainer"] |= {"numNodes": "two"}
    with pytest.raises(ValueError, match="numNodes"):
        as_kubeflow_reads(TrainerV1alpha1TrainJob, job)


def test_two_machines_train_together(tmp_path):
    """Two agents on this one, of a rank each, as the script starts them; sizes and layout are changed on its command line."""
    text = Path(re.__file__).read_text()
    (tmp_path / "text.txt").write_text(text[:4000])
    train_tokenizer(iter([text]), 300).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents/a.jsonl").write_text("".join(f'{{"text": "{"hello " * n}"}}\n' for n in range(20, 40)))
    (tmp_path / "run.yaml").write_text(
        f"model: {{preset: tiny-qwen3}}\ndata: {{train: [{{path: {tmp_path}/text.txt}}], tokenizer: {tmp_path}/tokenizer.json, "
        f"max_len: 64, overlong: split, cache: {tmp_path}/cache}}\ntrain: {{tokens_per_step: 64, steps: 1, lr: 1e-3, precision: float32}}\n"
        f"save: {{dir: {tmp_path}/first}}\n"
    )
    assert len(list(ls.train(tmp_path / "run.yaml"))) == 1
    ls.export(tmp_path / "first", to=tmp_path / "Qwen3-0.6B")
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    given = os.environ | {"NODES": "2", "GPUS": "1", "PORT": port, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    given["PATH"] = f"{Path(sys.executable).parent}:{given['PATH']}"
    small = f"layout=dp2 data.cache={tmp_path}/cache data.max_len=64 train.tokens_per_step=64 train.steps=2 train.warmup=1 save.dir=run"
    command = ["bash", str(LAUNCH / "torchrun.sh"), *shlex.split(small)]
    agents = [subprocess.Popen(command, cwd=tmp_path, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in "12"]
    try:
        said = [agent.communicate(timeout=150)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert [row["step"] for row in read_rows(tmp_path / "run/metrics.jsonl")] == [1, 2]
    assert sum("finished at step 2 of 2" in one for one in said) == 1  # rank 0 alone speaks
