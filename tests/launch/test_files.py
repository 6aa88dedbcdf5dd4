"""The launch files: each is read as the tool it is for would read it."""

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "mpi_launch"
SCRIPTS = [
    LAUNCH / "local",
    LAUNCH / "slurm.sbatch",
    ROOT / ".ci" / "run",
    ROOT / ".ci" / "readme_commands",
    ROOT / ".ci" / "kernel_tests",
]
SBATCH_OPTIONS = {
    "account",
    "array",
    "chdir",
    "comment",
    "constraint",
    "cpus-per-task",
    "dependency",
    "error",
    "exclude",
    "exclusive",
    "export",
    "gpus",
    "gpus-per-node",
    "gpus-per-task",
    "gres",
    "hint",
    "job-name",
    "kill-on-invalid-dep",
    "licenses",
    "mail-type",
    "mail-user",
    "mem",
    "mem-per-cpu",
    "mem-per-gpu",
    "no-requeue",
    "nodelist",
    "nodes",
    "ntasks",
    "ntasks-per-core",
    "ntasks-per-node",
    "open-mode",
    "output",
    "overcommit",
    "partition",
    "qos",
    "requeue",
    "reservation",
    "signal",
    "switches",
    "threads-per-core",
    "time",
    "wait",
}
DOCKER_INSTRUCTIONS = {
    "ADD",
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "EXPOSE",
    "FROM",
    "HEALTHCHECK",
    "LABEL",
    "RUN",
    "SHELL",
    "STOPSIGNAL",
    "USER",
    "VOLUME",
    "WORKDIR",
    "COMMENT",
}


def job() -> dict:
    return yaml.safe_load((LAUNCH / "kubernetes-mpijob.yaml").read_text())


def container(replica: str) -> dict:
    return job()["spec"]["mpiReplicaSpecs"][replica]["template"]["spec"]["containers"][0]


def dockerfile() -> list[dict]:
    parser = DockerfileParser(fileobj=io.BytesIO((LAUNCH / "Dockerfile").read_bytes()))
    return [line for line in parser.structure if line["instruction"] != "COMMENT"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_shellcheck_finds_nothing(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    found = subprocess.run([Path(sys.executable).with_name("shellcheck"), script], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_sbatch_directives_are_options_of_sbatch_and_precede_every_command():
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert len(directives) >= 5
    assert max(directives) < first_command  # Slurm reads no directive after a command
    for number in directives:
        matched = re.fullmatch(r"#SBATCH --([a-z-]+)(=\S+)?", lines[number])
        assert matched, lines[number]
        assert matched[1] in SBATCH_OPTIONS


def test_the_slurm_script_starts_the_ranks_of_its_allocation_and_passes_arguments_on(tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\nprintf "%s|" "$@"\nexit 7\n')
    mpirun.chmod(0o755)
    done = subprocess.run(
        ["bash", LAUNCH / "slurm.sbatch", "pong", "--set", "env.kwargs={a = 1}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_NTASKS": "64"},
    )
    assert done.returncode == 7, done.stderr
    printed, given = done.stdout.splitlines()
    assert shlex.split(printed.removeprefix("+")) == ["mpirun", *given.strip("|").split("|")]
    assert given == "-n|64|python|-m|ddrl.run|pong|--set|env.kwargs={a = 1}|"


@pytest.mark.parametrize(
    ("restarts", "checkpoint", "status", "given", "requeued"),
    [
        ("0", True, 7, "pong", True),
        ("1", True, 7, "--resume {run}", True),
        ("1", False, 7, "pong", False),
        ("3", True, 7, "--resume {run}", False),
        ("1", True, 130, "--resume {run}", False),
        ("1", True, 0, "--resume {run}", False),
    ],
)
def test_the_slurm_script_puts_a_job_that_failed_back_and_resumes_it(
    restarts, checkpoint, status, given, requeued, tmp_path
):
    for name, text in (("mpirun", f'echo ranks "$@"; exit {status}'), ("scontrol", 'echo "$@" > requeued')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    run = tmp_path / "a run"
    (run / "checkpoints" / ("000001000" if checkpoint else ".000001000.77")).mkdir(parents=True)
    (tmp_path / "ddrl-41.run").write_text(str(run))
    done = subprocess.run(
        ["bash", LAUNCH / "slurm.sbatch", "pong"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_NTASKS": "64",
            "SLURM_JOB_ID": "41",
            "SLURM_RESTART_COUNT": restarts,
        },
    )
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines()[1] == f"ranks -n 64 python -m ddrl.run {given.format(run=run)}"
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 41\n"


def test_the_mpijob_is_one_the_operator_accepts():
    schema = json.loads((Path(__file__).parent / "mpijob_v2beta1.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(job(), schema)
    wrong = job()
    wrong["spec"]["slotPerWorker"] = 1
    with pytest.raises(jsonschema.ValidationError, match="slotPerWorker"):
        jsonschema.validate(wrong, schema)


def test_the_mpijob_asks_for_as_many_ranks_as_its_workers_have_slots():
    spec, arguments = job()["spec"], container("Launcher")["args"]
    assert (
        int(arguments[arguments.index("-n") + 1])
        == spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    )


def test_every_volume_of_the_mpijob_is_mounted_and_shared_memory_is_roomy():
    pod = job()["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    memory = next(volume for volume in pod["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory")
    assert mounts[memory["name"]] == "/dev/shm"


def test_the_image_holds_what_the_mpijob_starts():
    image = (LAUNCH / "Dockerfile").read_text()
    assert "openssh-server" in image
    assert container("Worker")["command"] == ["/usr/sbin/sshd"]
    assert container("Worker")["args"][-1] in image
    assert f"Port {container('Worker')['ports'][0]['containerPort']}" in image
    assert f"{job()['spec']['sshAuthMountPath']}/id_rsa" in image
    assert f"--uid {container('Worker')['securityContext']['runAsUser']}" in image
    home = container("Launcher")["command"][0].removesuffix("/bin/mpirun")
    assert f"PATH={home}/bin" in image


def test_the_dockerfile_is_made_of_known_instructions_and_copies_what_exists():
    lines = dockerfile()
    assert lines[0]["instruction"] == "FROM"
    assert {line["instruction"] for line in lines} <= DOCKER_INSTRUCTIONS
    stages = [line["value"].partition(" AS ")[2] for line in lines if line["instruction"] == "FROM"]
    for line in lines:
        if line["instruction"] == "COPY":
            options = [word for word in line["value"].split() if word.startswith("--")]
            sources = [word for word in line["value"].split() if not word.startswith("--")][:-1]
            stage = next((word.removeprefix("--from=") for word in options if word.startswith("--from=")), None)
            assert stage in stages if stage else all((ROOT / source).exists() for source in sources), line["content"]
    assert json.loads(lines[-1]["value"])[0] == "mpi_launch/local"


def test_dependencies_of_the_image_are_a_layer_before_the_sources():
    lines = [f"{line['instruction']} {line['value']}" for line in dockerfile()]
    sources = lines.index("COPY . .")
    dependencies = next(place for place, line in enumerate(lines) if "-r wanted" in line)
    assert dependencies < sources
    assert "--no-deps --no-build-isolation" in lines[sources + 1]
    copied = next(line for line in lines[:dependencies][::-1] if line.startswith("COPY")).split()[1:-1]
    assert {Path(path).name for path in copied} == {"pyproject.toml", "constraints.txt", "requirements.py"}


@pytest.mark.parametrize(
    ("extras", "some"), [("train,mpi", "torch>=2.6"), ("", "numpy>=1.26"), ("all", "streamlit>=1.43")]
)
def test_requirements_of_the_image_are_those_of_the_project(extras, some):
    program = [sys.executable, LAUNCH / "requirements.py", extras]
    given = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {some, "nanobind>=2.4", "cmake", "numpy>=1.26"} <= set(given)
    assert not [line for line in given if line.startswith("ddrl")]
    assert len(given) == len(set(given))


def test_the_image_does_not_run_as_root():
    users = [line["value"] for line in dockerfile() if line["instruction"] == "USER"]
    assert users
    assert users[-1] != "root"


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_every_launch_file_is_named_in_the_readme(path):
    assert f"`{path.name}`" in (LAUNCH / "README.md").read_text() or path.name == "README.md"
