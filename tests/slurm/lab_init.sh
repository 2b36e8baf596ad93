# Pid 1 of the lab: a network without a way out, the controller's daemons, and one namespace set per node.
# Arguments: folder, number of nodes, network, accounting (1 or 0). Reads commands from run/commands.
root=$1 nodes=$2 net=$3 accounting=$4
here=$(dirname "$0")
export SLURM_CONF=$root/etc/slurm.conf

retry() { # times, command...: until it succeeds, every 20 ms
    local left=$1
    shift
    until "$@" >/dev/null 2>&1; do
        [ $((left -= 1)) -gt 0 ] || { echo "gave up: $*" >&2; return 1; }
        sleep 0.02
    done
}

start_accounting() {
    mariadb-install-db --no-defaults --datadir="$root/db" --auth-root-authentication-method=normal --skip-test-db \
        --user=root >"$root/log/mariadb-install.log" 2>&1 || return 1
    mariadbd --no-defaults --user=root --datadir="$root/db" --socket="$root/run/my.sock" \
        --pid-file="$root/run/mariadbd.pid" --skip-networking --skip-grant-tables --skip-log-bin \
        --innodb-buffer-pool-size=64M --innodb-log-file-size=16M --innodb-flush-log-at-trx-commit=0 \
        --innodb-lock-wait-timeout=900 --log-error="$root/log/mariadbd.log" </dev/null >/dev/null 2>&1 &
    retry 1500 mariadb --no-defaults -S "$root/run/my.sock" -e 'select 1' || return 1
    start_slurmdbd
}

start_slurmdbd() {
    MYSQL_UNIX_PORT=$root/run/my.sock slurmdbd || return 1
    retry 500 timeout 5 sacctmgr -n show cluster
}

start_slurmctld() {
    slurmctld -f "$SLURM_CONF" || return 1
    # A node that registers earlier is refused and tries again much later.
    retry 1500 bash -c 'scontrol ping | grep -q "is UP"'
}

start_node() {
    [ ! -s "$root/run/node$1.pid" ] || kill -9 "$(cat "$root/run/node$1.pid")" 2>/dev/null
    setsid unshare --net --uts --ipc --pid --mount --fork --kill-child --mount-proc \
        bash "$here/node_init.sh" "$root" "node$1" "$net.$((10 + $1))/24" </dev/null >"$root/log/node$1-init.log" 2>&1 &
    local parent=$! pid=
    until [ -n "$pid" ]; do
        pid=$(ps -o pid= --ppid "$parent" | tr -d ' ')
        [ -n "$pid" ] || sleep 0.01
    done
    echo "$pid" >"$root/run/node$1.pid"
    ip link del "v$1" 2>/dev/null
    retry 500 ip link add "v$1" type veth peer name eth0 netns "$pid"
    ip link set "v$1" master br0 up
}

hostname ctl
mount --bind "$root/etc/hosts" /etc/hosts
mount -t tmpfs -o size=24m tmpfs "$root/small" # a disk that fills quickly
ip link set lo up
ip link add br0 type bridge
ip addr add "$net.1/24" dev br0
ip link set br0 up
munged --key-file="$root/munge/key" --socket="$root/run/munge.sock" --pid-file="$root/munge/pid" \
    --log-file="$root/munge/log" --seed-file="$root/munge/seed" || exit 1
[ "$accounting" = 0 ] || start_accounting || exit 1
start_slurmctld || exit 1
mkfifo "$root/run/commands"
exec 9<>"$root/run/commands"
for number in $(seq "$nodes"); do start_node "$number"; done
while read -r -u 9 what which; do
    case $what in
    node) start_node "$which" ;;
    slurmctld) start_slurmctld ;;
    slurmdbd) start_slurmdbd ;;
    esac
done
