#!/bin/sh
# Gives the node's daemons their own view of the fixed paths they use, then holds the mount
# namespace. Arguments: the node's folder. Runs in a mount namespace of its own.
set -eu
node=$1

# Volumes with mount propagation expect a shared tree; unshare made it private.
mount --make-rshared /
mount --bind "$node/lib" /var/lib
mount --bind "$node/log" /var/log
mount -t tmpfs -o mode=755 tmpfs /run

# The kubelet sets these for the whole machine. It finds its values here and lets them be.
pretend() {
	file=/run/$(basename "$1")
	echo "$2" >"$file"
	mount --bind "$file" "/proc/sys/$1"
}
pretend vm/overcommit_memory 1
pretend kernel/panic 10
pretend kernel/panic_on_oops 1

touch "$node/mounted"
exec sleep infinity
