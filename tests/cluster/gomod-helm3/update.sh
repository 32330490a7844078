#!/bin/sh
# Rewrites go.mod and go.sum for a version of Helm 3: update.sh 3.21.4. They begin as those of
# ../gomod, so that both modules hold the same versions of the libraries that they share; take one
# that is built on the same minor release of k8s.io/*.
set -eu
cd "$(dirname "$0")"

cp ../gomod/go.mod ../gomod/go.sum .
go mod edit -module=specserve.test/helm3
for command in containerd containerd-shim-runc-v2 ctr; do
	go mod edit -droptool="github.com/containerd/containerd/v2/cmd/$command"
done
for module in helm.sh/helm/v4 k8s.io/kubernetes go.etcd.io/etcd/server/v3 \
	github.com/containerd/containerd/v2; do
	go mod edit -droprequire="$module"
done
go mod edit -require="helm.sh/helm/v3@v$1" -tool=helm.sh/helm/v3/cmd/helm
GOFLAGS=-mod=mod go mod tidy
