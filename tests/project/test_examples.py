"""The examples for containers are what compose programs and Kubernetes read. Tried for real: tests/fresh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sidestep import config
from sidestep.config import ENV_SOCKET
from sidestep.native import layout

EXAMPLES = Path(layout.__file__).parents[3] / "examples"
SERVICE = {
    "image", "user", "read_only", "cap_drop", "security_opt", "environment", "volumes", "pid", "network_mode",
    "userns_mode", "restart", "command", "depends_on",
}  # fmt: skip
POD = {
    "affinity", "automountServiceAccountToken", "containers", "hostNetwork", "hostPID", "initContainers",
    "restartPolicy", "tolerations", "volumes",
}  # fmt: skip
CONTAINER = {"name", "image", "imagePullPolicy", "command", "env", "securityContext", "volumeMounts"}
LIBRARY = "/opt/sidestep/libsidestep.so"  # where examples/Containerfile puts it
OURS = {"LD_PRELOAD": LIBRARY, ENV_SOCKET: str(config.SYSTEM_SOCKET)}


@pytest.fixture
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    return found


@pytest.fixture
def objects() -> dict[tuple[str, str], dict[str, Any]]:
    """Of Kubernetes, by kind and name."""
    found = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def pods(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    of_set = objects["DaemonSet", "sidestep"]["spec"]["template"]["spec"]
    return {"sidestep": of_set} | {name: objects["Pod", name]["spec"] for name in ("redis", "client")}


def test_compose_has_fields_and_volumes_that_exist(compose: dict[str, Any]) -> None:
    assert set(compose) == {"x-program", "services", "volumes"}
    for service in compose["services"].values():
        assert set(service) <= SERVICE
        assert {volume.split(":")[0] for volume in service["volumes"]} <= set(compose["volumes"])
        assert set(service.get("depends_on", ())) <= set(compose["services"])


def test_compose_gives_programs_the_library_and_the_directory_and_nothing_else(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name in ("redis", "client"):
        assert services[name]["environment"] == OURS
        assert services[name]["volumes"] == ["run:/run/sidestep:ro", "library:/opt/sidestep:ro"]
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["read_only"]
        assert not {"privileged", "pid", "network_mode", "userns_mode", "cap_add"} & set(services[name])
    assert services["library"]["command"][-2:] == [LIBRARY, "/library/"]


def test_kubernetes_has_fields_and_volumes_that_exist(objects: dict[tuple[str, str], dict[str, Any]]) -> None:
    kinds = {("Namespace", "v1"), ("DaemonSet", "apps/v1"), ("Pod", "v1"), ("Service", "v1")}
    assert {(one["kind"], one["apiVersion"]) for one in objects.values()} == kinds
    for pod in pods(objects).values():
        assert set(pod) <= POD
        volumes = {volume["name"]: set(volume) - {"name"} for volume in pod["volumes"]}
        assert all(kind in ({"hostPath"}, {"emptyDir"}) for kind in volumes.values())
        for container in (*pod["initContainers"], *pod["containers"]):
            assert set(container) <= CONTAINER
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
    selected = objects["DaemonSet", "sidestep"]["spec"]
    assert selected["selector"]["matchLabels"] == selected["template"]["metadata"]["labels"]
    service = objects["Service", "redis"]["spec"]
    assert service["selector"] == objects["Pod", "redis"]["metadata"]["labels"]
    assert service["clusterIP"] == "None", "through a translated address nothing is promoted"


def test_pods_get_the_library_and_one_directory_of_the_node(objects: dict[tuple[str, str], dict[str, Any]]) -> None:
    run = {"name": "run", "mountPath": "/run/sidestep", "readOnly": True}
    library = {"name": "library", "mountPath": "/opt/sidestep", "readOnly": True}
    for name in ("redis", "client"):
        pod = pods(objects)[name]
        (program,) = pod["containers"]
        assert {one["name"]: one["value"] for one in program["env"]} == OURS
        assert program["volumeMounts"] == [run, library]
        assert [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume] == ["/run/sidestep"]
        assert not {"hostPID", "hostNetwork", "hostUsers"} & set(pod)
    one_user = {pods(objects)[name]["containers"][0]["securityContext"]["runAsUser"] for name in ("redis", "client")}
    assert len(one_user) == 1


def test_nothing_in_a_pod_may_do_more_than_it_must(objects: dict[tuple[str, str], dict[str, Any]]) -> None:
    for pod in pods(objects).values():
        for container in (*pod["initContainers"], *pod["containers"]):
            may = container["securityContext"]
            assert not may["allowPrivilegeEscalation"]
            assert may["readOnlyRootFilesystem"]
            assert may["capabilities"]["drop"] == ["ALL"]
            assert may["capabilities"].get("add", []) == (["CHOWN"] if container["name"] == "directory" else [])
