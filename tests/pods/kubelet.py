"""A stand-in for a cluster: it starts the pods of rendered manifests as containers on one network.

It does what Kubernetes would do with them: names in DNS, user, read-only root, dropped
capabilities, limits, variables, volumes that live as long as their pod, probes, and updates of one
pod after the other. It knows the fields that our manifests have, and refuses others.
"""

from __future__ import annotations

import os
import re
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.system.containers import engine, process_of, read_until
from tests.system.manifests import Manifest, container_of, pod_of, rendered, variables

DEADLINE_S = 180.0
"""For a pod to be ready, or to say something."""

_POD_FIELDS = {
    "automountServiceAccountToken", "containers", "enableServiceLinks", "restartPolicy",
    "securityContext", "terminationGracePeriodSeconds", "topologySpreadConstraints", "volumes",
}  # fmt: skip
_CONTAINER_FIELDS = {
    "args", "command", "env", "image", "livenessProbe", "name", "ports", "readinessProbe",
    "resources", "securityContext", "startupProbe", "volumeMounts",
}  # fmt: skip
_MEBIBYTES = {"Mi": 1, "Gi": 1024}


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that runs: the container of one ordinal of a workload."""

    name: str
    container: str


class Namespace:
    """Where pods find each other by name, and where claims outlive them."""

    def __init__(self) -> None:
        self.name = f"pods-{uuid.uuid4().hex[:8]}"
        engine("network", "create", self.name)

    def close(self) -> None:
        """Remove it, with its claims; its pods are gone."""
        for volume in engine("volume", "ls", "--quiet", f"--filter=name={self.name}").split():
            engine("volume", "rm", "--force", volume)
        engine("network", "rm", self.name)


class Kubelet:
    """The workloads of a folder, each pod of them a container.

    Args:
        folder: as `kubectl apply -k` takes it.
        image: the image of all pods.
        namespace: where they are.
    """

    def __init__(self, folder: Path, image: str, namespace: Namespace) -> None:
        self._manifests = rendered(folder)
        self._image = image
        self._namespace = namespace.name
        self._pods: dict[tuple[str, int], Pod] = {}

    def close(self) -> None:
        """Remove every pod."""
        for component, ordinal in list(self._pods):
            self.delete(component, ordinal, grace_s=0)

    def delete_folder(self) -> None:
        """What `kubectl delete -k` does: all pods are stopped at once, and the claims that have
        manifests are removed; those that a StatefulSet's controller made stay.
        """
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda place: self.delete(*place), list(self._pods)))
        for claim in self._manifests:
            if claim["kind"] == "PersistentVolumeClaim":
                engine("volume", "rm", "--force", self._volume(claim["metadata"]["name"]))

    def apply(self) -> None:
        """Start every pod."""
        for component, workload in self._workloads().items():
            spec = workload["spec"]
            for ordinal in range(spec.get("replicas", spec.get("completions"))):
                self.start(component, ordinal)

    def start(self, component: str, ordinal: int) -> None:
        """Start a pod, new in all but its name."""
        workload = self._workloads()[component]
        pod, container = pod_of(workload), container_of(workload)
        assert pod.keys() <= _POD_FIELDS
        assert container.keys() <= _CONTAINER_FIELDS
        name = f"{workload['metadata']['name']}-{ordinal}"
        names = [name, *self._names_in_dns(workload, name)]
        user, dropped = pod["securityContext"], container["securityContext"]["capabilities"]["drop"]
        environment = variables(workload, ordinal)
        started = engine(
            "run", "--detach", "--name", f"{self._namespace}-{name}", "--hostname", name,
            "--network", self._namespace, *(f"--network-alias={each}" for each in names),
            f"--user={user['runAsUser']}:{user['runAsGroup']}", "--read-only",
            *(f"--cap-drop={each}" for each in dropped), "--security-opt=no-new-privileges",
            f"--memory={_mebibytes(container['resources']['limits']['memory'])}m",
            f"--restart={'no' if pod.get('restartPolicy') == 'Never' else 'always'}",
            *(f"--env={variable}={value}" for variable, value in environment.items()),
            *self._volumes(workload, name),
            self._image, *container["command"], *container.get("args", ()),
        )  # fmt: skip
        self._pods[component, ordinal] = Pod(name, started.split()[-1])

    def pod(self, component: str, ordinal: int) -> Pod:
        """A pod that was started."""
        return self._pods[component, ordinal]

    def delete(self, component: str, ordinal: int, grace_s: int | None = None) -> None:
        """Stop a pod as `kubectl delete` does, and forget what was its own."""
        pod = self._pods.pop((component, ordinal))
        workload = pod_of(self._workloads()[component])
        grace = workload["terminationGracePeriodSeconds"] if grace_s is None else grace_s
        if grace:
            engine("stop", "--time", str(grace), pod.container, timeout_s=grace + DEADLINE_S)
        engine("rm", "--force", pod.container)
        for volume in workload["volumes"]:
            if "emptyDir" in volume:
                engine("volume", "rm", "--force", self._volume(f"{pod.name}-{volume['name']}"))

    def kill(self, component: str, ordinal: int) -> None:
        """End a container as the kernel would when memory runs out; a pod that restarts its
        containers does so.
        """
        os.kill(process_of(self._pods[component, ordinal].container), signal.SIGKILL)

    def lose(self, *places: tuple[str, int]) -> None:
        """The node of these pods is gone, and with it all that was theirs; they start elsewhere."""
        for place in places:
            engine("kill", "--signal=KILL", self._pods[place].container)
        for place in places:
            self.delete(*place, grace_s=0)
            self.start(*place)

    def restart_all(self, component: str) -> None:
        """What `kubectl rollout restart statefulset` does: from the last pod to the first, the next
        one when the one before has been ready for minReadySeconds.
        """
        spec = self._workloads()[component]["spec"]
        for ordinal in reversed(range(spec["replicas"])):
            self.delete(component, ordinal)
            self.start(component, ordinal)
            self.until_ready(component, ordinal, spec["minReadySeconds"])

    def until_ready(self, component: str, ordinal: int, for_s: float = 0.0) -> None:
        """Wait until the pod's own readiness probe has held for so long."""
        probe = container_of(self._workloads()[component])["readinessProbe"]["grpc"]
        asked = health_pb2.HealthCheckRequest(service=probe.get("service", ""))
        with grpc.insecure_channel(
            f"{self.address(component, ordinal)}:{probe['port']}"
        ) as channel:
            grpc.channel_ready_future(channel).result(DEADLINE_S)
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = partial(stub.Watch, asked)
            for answer in watch(timeout=DEADLINE_S):
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
            try:
                seen = [answer.status for answer in watch(timeout=max(for_s, 1.0))]
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # noqa: PT017
            else:
                raise AssertionError(f"{component} {ordinal} was ready, and then {seen}")

    def address(self, component: str, ordinal: int) -> str:
        """Where this machine reaches a pod."""
        shown = f'{{{{(index .NetworkSettings.Networks "{self._namespace}").IPAddress}}}}'
        return engine("inspect", "--format", shown, self._pods[component, ordinal].container)

    def until_said(
        self, component: str, ordinal: int, pattern: str, count: int = 1
    ) -> re.Match[str]:
        """Wait for a line of a pod: the first that matches, or the `count`th, of all its starts."""
        return read_until(self._pods[component, ordinal].container, pattern, DEADLINE_S, count)

    def logs(self, component: str, ordinal: int) -> str:
        """What a pod has printed."""
        return engine("logs", self._pods[component, ordinal].container)

    def run_in(self, component: str, ordinal: int, *command: str) -> str:
        """What a command prints in a pod's container."""
        return engine("exec", self._pods[component, ordinal].container, *command)

    def until_completed(self, component: str, ordinal: int) -> int:
        """The exit status of a pod that ends by itself."""
        return int(engine("wait", self._pods[component, ordinal].container))

    def _workloads(self) -> dict[str, Manifest]:
        return {
            m["metadata"]["labels"]["app.kubernetes.io/component"]: m
            for m in self._manifests
            if "template" in m.get("spec", {})
        }

    def _names_in_dns(self, workload: Manifest, pod_name: str) -> list[str]:
        """Services without an address of their own resolve to the pods that they choose."""
        labels = workload["spec"]["template"]["metadata"]["labels"]
        services = [m for m in self._manifests if m["kind"] == "Service"]
        chosen = [s for s in services if s["spec"]["selector"].items() <= labels.items()]
        names = [s["metadata"]["name"] for s in chosen]
        governing = workload["spec"].get("serviceName")
        return [*names, *(f"{pod_name}.{name}" for name in names if name == governing)]

    def _volumes(self, workload: Manifest, pod_name: str) -> list[str]:
        declared = {volume["name"]: volume for volume in pod_of(workload)["volumes"]}
        for template in workload["spec"].get("volumeClaimTemplates", ()):
            name = template["metadata"]["name"]
            declared[name] = {"persistentVolumeClaim": {"claimName": f"{name}-{pod_name}"}}
        options = []
        for mount in container_of(workload)["volumeMounts"]:
            volume, path = declared[mount["name"]], mount["mountPath"]
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                assert path == "/dev/shm"  # noqa: S108 - Linux's place for shared memory
                options.append(f"--shm-size={_mebibytes(volume['emptyDir']['sizeLimit'])}m")
            elif "emptyDir" in volume:
                own = self._volume(f"{pod_name}-{mount['name']}")
                options.append(f"--volume={own}:{path}")
            else:
                claim = volume["persistentVolumeClaim"]["claimName"]
                options.append(f"--volume={self._volume(claim)}:{path}")
        return options

    def _volume(self, name: str) -> str:
        return f"{self._namespace}-{name}"


def _mebibytes(quantity: str) -> int:
    return int(quantity[:-2]) * _MEBIBYTES[quantity[-2:]]
