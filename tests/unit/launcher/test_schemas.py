"""Every file for a cluster fits the published schema of its kind, and a misspelt name does not.

The schemas are derived from the packages that `schemas.json` names with their versions; `make
schemas` derives them again and has the packages themselves read the files.
"""

from __future__ import annotations

import pytest

from megatron.launcher.command import BACKENDS
from tests.cluster_schemas.cases import (
    CASES,
    SCHEMA_OF,
    SCHEMAS,
    document_of,
    misspelt,
    plan_of,
)
from tests.harness.json_schema import problems

ALL = [(backend, flags) for backend, all_flags in CASES.items() for flags in all_flags]


def check(document, kind):
    return problems(document, SCHEMAS["schemas"][kind], SCHEMAS["$defs"])


@pytest.mark.parametrize(("backend", "flags"), ALL)
def test_a_file_fits_its_schema(backend, flags):
    document = document_of(backend, plan_of(backend, flags))
    assert not check(document, SCHEMA_OF[backend])
    if backend == "sky":
        assert not check(document["resources"], "SkyPilotResources")


@pytest.mark.parametrize("backend", CASES)
def test_a_misspelt_name_does_not_fit(backend):
    for flags in CASES[backend][-2:]:
        changed = list(misspelt(document_of(backend, plan_of(backend, flags))))
        assert len(changed) >= 2
        passed = [name for name, one in changed if not check(one, SCHEMA_OF[backend])]
        assert not passed


def test_a_value_of_another_type_does_not_fit():
    document = document_of("jobset", plan_of("jobset", CASES["jobset"][0]))
    document["spec"]["replicatedJobs"][0]["replicas"] = "1"
    assert check(document, "JobSet") == [
        "document.spec.replicatedJobs[0].replicas is '1', no integer"
    ]


def test_every_back_end_that_reads_a_document_is_checked():
    # The others get a script of shell or words, which tests run.
    assert set(BACKENDS) - set(CASES) == {"slurm", "ssh", "mpi"}


def test_the_nodes_of_a_job_set_meet_at_the_dns_name_of_the_first():
    document = document_of("jobset", plan_of("jobset", CASES["jobset"][0] + " --name my-job"))
    (replicated,) = document["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    # <jobSet.name>-<replicatedJob.name>-<job-index>-<pod-index>.<subdomain>
    assert "--master-addr my-job-node-0-0.my-job " in container["command"][2]
    assert replicated["name"] == "node"


@pytest.mark.parametrize("backend", ["trainjob", "pytorchjob", "jobset"])
def test_containers_have_shared_memory_and_volumes_and_may_lock_memory_for_rdma(backend):
    text = plan_of(backend, CASES[backend][3]).files[0].text
    for part in ("mountPath: /dev/shm", "medium: Memory", "sizeLimit: 32Gi", "- IPC_LOCK",
                 "claimName: data", "readOnly: true", "rdma/hca_shared_devices_a: '8'",
                 "terminationGracePeriodSeconds: 300"):  # fmt: skip
        assert part in text, part
    assert "privileged: true" not in text
