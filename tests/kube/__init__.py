"""A real Kubernetes control plane, with pods that run as local processes.

For `scripts/kube_cluster` only: API server, controller manager and etcd are real (1.20.2, the only
release that builds from Debian's sources); scheduler, kubelet and service proxy are the small ones
of this folder. Everything runs in one network and mount namespace, so nothing of it is seen, or
left, on the host.
"""
