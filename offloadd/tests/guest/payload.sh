#!/bin/bash
# Runs in the Debian of the test `service`, as root, when systemd has started it: installs, uses and removes the daemon. Each line that the test reads
# begins with GUEST. The first failure ends the script, with the daemon's log.
config=/etc/offloadd/offloadd.toml
say() { echo "GUEST $*"; }
off() { systemctl poweroff --force --force; sleep 600; }
failed() { say "FAILED $1"; echo "$2"; journalctl --sync; journalctl --no-pager -u offloadd | tail -n 40; off; }
must() { local what=$1 said; shift; said=$("$@" 2>&1) && say "OK $what" || failed "$what" "$said"; }
cannot() { local what=$1 said; shift; said=$("$@" 2>&1) && failed "$what" "$said" || say "OK $what"; }
main_pid() { systemctl show -p MainPID --value offloadd; }
status() { grep "^$1:" "/proc/$(main_pid)/status" | tr -s ' \t' ' '; }
# The daemon's last lines may still be on their way into the journal.
ready() { journalctl --sync; journalctl -u offloadd -o cat | grep '^READY' | tail -n 1; }
held() { offloadd job list --config $config --json | tr -d ' \n'; }

say "FACT $(systemctl --version | head -n 1), Linux $(uname -r)"
must "the package installs" dpkg -i /payload/offloadd.deb
cannot "it does not start by itself" systemctl --quiet is-active offloadd
sed -i 's|^devices = .*|devices = ["/var/lib/offloadd/one", "/var/lib/offloadd/two"]|; s|^arena_bytes_max = .*|arena_bytes_max = "64MiB"|' $config
cannot "without a store it is refused" systemctl start offloadd
systemctl reset-failed offloadd
must "its user formats a store" runuser -u offloadd -- offloadd format --config $config --size 16MiB
echo never >/sys/kernel/mm/transparent_hugepage/shmem_enabled
must "it starts, and systemd hears READY" systemctl enable --now offloadd
say "FACT doctor: $(offloadd doctor --config $config | grep -i 'huge pages' | tr -s ' ')"
say "FACT $(ready)"
say "FACT $(status Seccomp)"
say "FACT $(status NoNewPrivs)"
say "FACT $(status CapEff)"
say "FACT $(systemd-analyze security --no-pager offloadd | tail -n 1)"
useradd alice
cannot "who is not in its group is refused" runuser -u alice -- offloadd top --once
usermod -aG offloadd alice
must "a process of its group writes and commits" runuser -u alice -- env OFFLOADD_GUEST_SOCKET=/run/offloadd/offloadd.sock \
    /payload/writer --exact service::systemd_runs_the_installed_daemon --nocapture
say "FACT held $(held)"
must "the state is asked for" systemctl status --no-pager offloadd
must "a reload is taken" systemctl reload offloadd
cp $config /tmp/whole && echo 'devices = 7' >$config
cannot "a reload of settings that are wrong is refused" systemctl reload offloadd
must "and it serves on" systemctl --quiet is-active offloadd
cp /tmp/whole $config
before=$(main_pid)
kill -9 "$before"
for _ in $(seq 300); do [ "$(main_pid)" != "$before" ] && systemctl --quiet is-active offloadd && break; sleep 0.2; done
must "killed, it comes back" systemctl --quiet is-active offloadd
[ "$(main_pid)" != "$before" ] || failed "another process serves" "$before"
must "a restart" systemctl restart offloadd
must "everything is whole" offloadd verify --config $config
say "FACT held again $(held)"
lives=/tmp/lives
mkdir -m 777 $lives
runuser -u alice -- env OFFLOADD_GUEST_SOCKET=/run/offloadd/offloadd.sock OFFLOADD_GUEST_RESTART=$lives \
    /payload/writer --exact service::systemd_runs_the_installed_daemon --nocapture >/tmp/lives.log 2>&1 &
for _ in $(seq 300); do [ -e $lives/written ] || [ -z "$(jobs -r)" ] && break; sleep 0.2; done
must "a process writes what it has not committed" test -e $lives/written
must "a restart beside it" systemctl restart offloadd
touch $lives/restarted
wait $! && say "OK its session continues, and commits" || failed "its session continues, and commits" "$(cat /tmp/lives.log)"
must "it stops" systemctl stop offloadd
say "FACT $(systemctl show -p Result offloadd)"
# Without an enforced filter, the daemon would use io_uring here too.
mkdir -p /etc/systemd/system/offloadd.service.d
printf '[Service]\nSystemCallFilter=~@aio\n' >/etc/systemd/system/offloadd.service.d/less.conf
systemctl daemon-reload
must "with less allowed it starts" systemctl start offloadd
say "FACT less: $(ready)"
rm -r /etc/systemd/system/offloadd.service.d
must "the package is removed" dpkg -r offloadd
cannot "which ends the daemon" systemctl --quiet is-active offloadd
must "and purged" dpkg -P offloadd
must "the store stays" test -s /var/lib/offloadd/one
say "END"
off
