"""SLURM: a batch script that chooses healthy nodes, restarts, saves and queues itself again.

Sources: the manual pages of sbatch, srun, scancel and scontrol; run under SLURM 22.05.8.
`--signal=B:USR1@N` tells the batch script alone, N seconds before the time limit and, with
`send_user_signal`, at a preemption; the script has scancel send SIGTERM to the processes of the
step. `scontrol requeue` ends the job and queues it again under the same number, with
SLURM_RESTART_COUNT one higher.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from megatron.core.foundation.failure_file import USELESS_TO_REPEAT
from megatron.launcher.job import Job
from megatron.launcher.plan import (
    JobFile,
    LaunchPlan,
    check_paths,
    check_words,
    exports,
    option_lines,
    probe_words,
    torchrun,
)

_PROBE_TIMEOUT_S = 300
_WAIT_S = 60
_SETTLE_S = 10
_HOPELESS = "|".join(USELESS_TO_REPEAT)


def plan(job: Job) -> LaunchPlan:
    """Return the batch script and the command that submits it."""
    path = f"{job.folder}/{job.name}.sbatch"
    check_paths(job, "SLURM")
    notes = []
    if job.value_of("--save") and "--exit-signal-handler" not in job.command:
        notes.append("without --exit-signal-handler the run does not save when it is told to leave")
    if not job.time_limit_s:
        notes.append("without --time-limit the partition's limit holds")
    return LaunchPlan((JobFile(path, script(job)),), (("sbatch", path),), tuple(notes))


def script(job: Job) -> str:
    """Return the batch script."""
    options = [f"#SBATCH {line}" for line in [*_options(job), *job.slurm.slurm_option]]
    is_probed = job.check or job.spare_nodes > 0
    parts = [
        "#!/bin/bash\n# Written by `lattice launch`: change the description, not this file.",
        "\n".join(options),
        "set -uo pipefail",
        "\n".join(_settings(job)),
        _REPORT,
        "\n".join(_srun(job)),
        _probed(job) if is_probed else _UNPROBED,
        _WAIT.replace("SETTLE_S", str(_SETTLE_S)),
        "\n".join(_again(job)),
        _attempts(job),
    ]
    return "\n\n".join(parts) + "\n"


def _options(job: Job) -> Iterator[str]:
    is_array = job.slurm.num_jobs > 1 or bool(job.slurm.variant)
    yield f"--job-name={job.name}"
    yield from option_lines([("partition", job.slurm.partition), ("account", job.slurm.account)])
    yield f"--nodes={job.nodes + job.spare_nodes}"
    yield "--ntasks-per-node=1"
    yield from option_lines(
        [("gpus-per-node", job.gpus_per_node), ("cpus-per-task", job.cpus_per_node)]
    )
    if job.memory_per_node_gib:
        yield f"--mem={job.memory_per_node_gib}G"
    if job.time_limit_s:
        minutes, rest = divmod(job.time_limit_s, 60)
        yield f"--time={minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}"
    yield f"--output={job.folder}/slurm-{'%A_%a' if is_array else '%j'}.log"
    yield "--open-mode=append"
    yield "--requeue"
    yield f"--signal=B:USR1@{job.save_before_end_s}"
    if job.spare_nodes:
        yield "--no-kill"
    if job.slurm.num_jobs > 1:
        yield f"--array=1-{job.slurm.num_jobs}%1"
    elif job.slurm.variant:
        yield f"--array=0-{len(job.slurm.variant) - 1}"


def _settings(job: Job) -> Iterator[str]:
    yield from exports(job)
    yield f"num_nodes={job.nodes}"
    yield "# Not through `head`: a command that is still writing would end with an error."
    yield 'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    yield f"command=({shlex.join(job.command)})"
    if job.slurm.variant:
        yield "variants=(" + " ".join(shlex.quote(words) for words in job.slurm.variant) + ")"
        yield 'read -ra added <<<"${variants[$SLURM_ARRAY_TASK_ID]}"'
        yield 'command=("${command[@]//\\{variant\\}/$SLURM_ARRAY_TASK_ID}" "${added[@]}")'
    save = shlex.quote(job.value_of("--save"))
    yield f"save={save}"
    if job.slurm.variant:
        yield "save=${save//\\{variant\\}/$SLURM_ARRAY_TASK_ID}"


_REPORT = 'say() { echo "lattice launch: $*" >&2; }'


def _srun(job: Job) -> Iterator[str]:
    """Yield the function that starts torchrun with some words on the chosen nodes."""
    start = torchrun(job, "$NUM_NODES", '"$SLURM_PROCID"', '"$MASTER_ADDR"', '"$MASTER_PORT"')
    inner = "\n".join(["set -e", *job.setup, f'exec {start} "$@"'])
    yield f"# A task for each node. --wait: one that ends leaves the others {_WAIT_S} s, instead of"
    yield "# ending them at once: they may be writing what it has written already."
    yield "start() {"
    yield "    # A port of its own for each job and attempt: jobs may share a machine."
    yield "    export NUM_NODES=$num_nodes MASTER_ADDR=${chosen[0]}"
    yield "    export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 7 + attempt) % 20000))"
    yield '    srun --nodes="$num_nodes" --ntasks="$num_nodes" --ntasks-per-node=1 \\'
    yield '        --nodelist="$(IFS=,; echo "${chosen[*]}")" --label \\'
    yield f"        --kill-on-bad-exit=0 --wait={_WAIT_S} \\"
    for option in _step_options(job):
        yield f"        {option} \\"
    yield f'        bash -c {shlex.quote(inner)} torchrun "$@" </dev/null &'
    yield "    step=$! started=$SECONDS running=step"
    yield '    [ -z "$stopping" ] || stop'
    yield "}"


def _step_options(job: Job) -> list[str]:
    """Return options of each step: srun takes neither cores nor the image from the job."""
    found = option_lines([("cpus-per-task", job.cpus_per_node)])
    if job.image:
        mounts = [f"{m.source}:{m.target}{':ro' * m.is_read_only}" for m in job.mounts]
        found.append(shlex.quote(f"--container-image={job.image}"))
        found.append(
            '--container-mounts="$PWD:$PWD"' + shlex.quote("".join(f",{m}" for m in mounts))
        )
        found.append('--container-workdir="$PWD"')
    return found


_UNPROBED = """\
choose_nodes() { chosen=("${hosts[@]:0:num_nodes}"); }"""


def _probed(job: Job) -> str:
    options = " ".join(_step_options(job))
    probe = f"timeout {_PROBE_TIMEOUT_S} {shlex.join(probe_words(job))}"
    inner = "\n".join([*job.setup, f'if {probe} >&2; then echo "healthy $SLURMD_NODENAME"; fi'])
    return f"""\
# The first nodes of the allocation that pass the health check.
choose_nodes() {{
    local healthy
    healthy=$(srun --nodes="${{#hosts[@]}}" --ntasks="${{#hosts[@]}}" --ntasks-per-node=1 \\
        --no-kill {options} bash -c {shlex.quote(inner)} </dev/null | sed -n 's/^healthy //p')
    chosen=()
    for host in "${{hosts[@]}}"; do
        if grep -qxF "$host" <<<"$healthy"; then
            chosen+=("$host")
        else
            say "$host did not pass its health check"
        fi
    done
    if [ "${{#chosen[@]}}" -lt "$num_nodes" ]; then
        say "${{#chosen[@]}} healthy nodes of ${{#hosts[@]}}, and $num_nodes are needed"
        exit 1
    fi
    chosen=("${{chosen[@]:0:num_nodes}}")
}}"""


_WAIT = """\
# SIGUSR1 comes before the time limit, SIGTERM at a preemption: the run saves and leaves. scancel
# tells it, because srun kills its tasks when it gets SIGTERM itself.
stopping=
step=
running=
started=0
stop() {
    stopping=1
    say "told to stop; the run saves and leaves"
    case $running in
        step)
            # The controller may not know the step yet.
            [ "$((SECONDS - started))" -ge SETTLE_S ] || sleep SETTLE_S
            scancel --signal=TERM "$SLURM_JOB_ID"
            ;;
        delay) kill "$step" ;;
    esac
}
trap stop USR1 TERM

wait_for_step() { # a signal interrupts `wait`, which then tells of the signal
    while kill -0 "$step" 2>/dev/null; do
        wait "$step"
    done
    running=
    wait "$step"
}"""


def _again(job: Job) -> Iterator[str]:
    """Yield the function that ends a job which was told to stop."""
    yield "leave() {"
    if job.slurm.num_jobs > 1:
        yield '    say "the next job of the array continues from the checkpoint"'
        yield "    exit 0"
    else:
        yield f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {job.slurm.max_requeues} ]; then'
        yield f'        say "queued again {job.slurm.max_requeues} times already"'
        yield "        exit 1"
        yield "    fi"
        yield '    say "queued again"'
        yield '    scontrol requeue "$SLURM_JOB_ID"'
        yield "    exit 0"
    yield "}"


def _attempts(job: Job) -> str:
    """Return the loop over attempts."""
    finish = "exit 0"
    if job.slurm.num_jobs > 1:
        finish = 'scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"\n        exit 0'
    check = ""
    if job.check:
        check = f"""
    start {shlex.join(check_words(job))}
    wait_for_step || {{ say "the nodes did not pass their check"; exit 1; }}
    [ -z "$stopping" ] || leave"""
    return f"""\
attempt=0
while :; do
    choose_nodes
    [ -z "$stopping" ] || leave{check}
    start "${{command[@]}}"
    wait_for_step
    status=$?
    if [ "$status" -eq 0 ]; then
        {finish}
    fi
    [ -z "$stopping" ] || leave
    if grep -qsE '"class": "({_HOPELESS})"' "$save/failure.json"; then
        say "the same command would fail again: see $save/failure.json"
        exit "$status"
    fi
    attempt=$((attempt + 1))
    if [ "$attempt" -gt {job.max_restarts} ]; then
        say "failed {job.max_restarts + 1} times"
        exit "$status"
    fi
    delay=$(({job.backoff_s} << (attempt - 1)))
    delay=$((delay < 600 ? delay : 600))
    say "attempt $attempt of {job.max_restarts} to start again, in $delay s"
    sleep "$delay" &
    step=$! running=delay
    wait_for_step
    [ -z "$stopping" ] || leave
done"""
