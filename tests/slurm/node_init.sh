# Pid 1 of one node. Arguments: the lab's folder, the node's name, its address. Outlives slurmd and reaps orphans.
root=$1 name=$2 address=$3
hostname "$name"
mount --bind "$root/etc/hosts" /etc/hosts
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount -t tmpfs -o size=2g tmpfs /var/tmp
ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.01; done
ip addr add "$address" dev eth0
ip link set eth0 up
slurmd -D -f "$root/etc/slurm.conf" </dev/null >/dev/null 2>>"$root/log/slurmd-$name.err" &
while :; do
    wait
    sleep 0.2
done
