#!/bin/sh
# Rewrites go.mod and go.sum for the versions in ../versions.toml. All of them must be built on
# the same minor release of k8s.io/*, as one module holds one version of each library.
set -eu
cd "$(dirname "$0")"

version() { sed -n "s/^$1 = \"\(.*\)\"/\1/p" ../versions.toml; }
kubernetes=$(version kubernetes)
staging=0.${kubernetes#1.}

rm -f go.mod go.sum
go mod init specserve.test/kube
source=$(go mod download -json "k8s.io/kubernetes@v$kubernetes" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')

# Kubernetes replaces its staging modules by folders of its own tree; only as replacements can they
# be given versions without being fetched (some samples are not served at all).
for module in $(sed -n 's,.*\(k8s.io/[a-z-]*\) => ./staging.*,\1,p' "$source/go.mod"); do
	go mod edit -replace="$module=$module@v$staging"
done
go mod edit \
	-require="k8s.io/kubernetes@v$kubernetes" \
	-require="k8s.io/client-go@v$staging" \
	-require="k8s.io/component-base@v$staging" \
	-require="k8s.io/kubectl@v$staging" \
	-require="go.etcd.io/etcd/server/v3@v$(version etcd)" \
	-require="helm.sh/helm/v4@v$(version helm)" \
	-require="github.com/containerd/containerd/v2@v$(version containerd)"
for command in containerd containerd-shim-runc-v2 ctr; do
	go mod edit -tool="github.com/containerd/containerd/v2/cmd/$command"
done
go mod tidy
