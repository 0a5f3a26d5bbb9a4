"""The NFS server of scripts/nfs_lab and what it exports: nfs-ganesha over two memory disks and one with a quota."""

from __future__ import annotations

from pathlib import Path

from lab_commands import LabError, run, wait_until

from nfs_lab_parts import net
from nfs_lab_parts.net import LAB

EXPORTS = ("main", "small", "quota")
PORT = 2049
LEASE_S = 20  # a guest that gets no CPU for longer loses what it had open, and sees EIO
SMALL_MB, QUOTA_MB, QUOTA_DISK_MB = 16, 8, 128
_CONF, _LOG = LAB / "ganesha.conf", LAB / "ganesha.log"

_GANESHA = """\
# Written by scripts/nfs_lab; changes are lost.
NFS_CORE_PARAM {{
    Protocols = 3, 4;
    MNT_Port = 20048;
    Mount_Path_Pseudo = true;
    Bind_addr = {server};
    Enable_UDP = false;
    Enable_RQUOTA = false;
    Enable_NLM = false;
}}
NFS_KRB5 {{ Active_krb5 = false; }}
NFSv4 {{
    Minor_Versions = 1, 2;
    RecoveryRoot = {lab}/recovery;
    Lease_Lifetime = {lease_s};
    {grace}
    Allow_Numeric_Owners = true;
    Only_Numeric_Owners = true;
}}
LOG {{ Default_Log_Level = EVENT; }}
"""
_EXPORT = """\
EXPORT {{
    Export_Id = {number};
    Path = {path};
    Pseudo = /{name};
    Access_Type = RW;
    Squash = No_root_squash;
    SecType = sys;
    Filesystem_id = {number}.{number};
    FSAL {{ Name = VFS; }}
}}
"""


def path_of(name: str) -> Path:
    """Where the export lies on this machine."""
    return LAB / "exports" / name


def make(space_mb: int, grace_s: int) -> None:
    """The file systems and the server's configuration. Sizes in MiB; 0 seconds of grace means none."""
    grace = f"Grace_Period = {grace_s};" if grace_s else "Graceless = true;"
    text = _GANESHA.format(lab=LAB, server=net.SERVER, lease_s=LEASE_S, grace=grace)
    for number, name in enumerate(EXPORTS, start=1):
        text += _EXPORT.format(number=number, name=name, path=path_of(name))
        path_of(name).mkdir(parents=True)
    _CONF.write_text(text)
    for name, size_mb in (("main", space_mb), ("small", SMALL_MB)):
        run("mount", "-t", "tmpfs", "-o", f"size={size_mb}m,mode=1777", f"nfslab-{name}", str(path_of(name)))
    image, disk = LAB / "quota.img", path_of("quota")
    with image.open("wb") as file:
        file.truncate(QUOTA_DISK_MB * 2**20)
    run("mkfs.btrfs", "--quiet", "--mixed", str(image))  # the one file system whose quotas need no kernel option
    run("mount", "-o", "loop", str(image), str(disk))
    run("btrfs", "quota", "enable", str(disk))
    run("btrfs", "qgroup", "limit", f"{QUOTA_MB}M", str(disk))
    disk.chmod(0o1777)


def start() -> None:
    if pid() is None:
        (LAB / "recovery").mkdir(exist_ok=True)
        start_portmapper()
        net.start(_LOG, "ganesha.nfsd", "-f", str(_CONF), "-L", str(_LOG), "-p", f"{LAB}/ganesha.pid", wait=True)
    if not wait_until(answers, 15):
        raise LabError(f"the NFS server doesn't answer{net.tail(_LOG)}")


def start_portmapper() -> None:
    """NFS 3 needs one. Its socket and lock have fixed paths in /run: it gets a /run of its own."""
    if next(net.running("rpcbind"), None) is None:
        private = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /run && exec rpcbind -f"]
        net.start(LAB / "rpcbind.log", *private)
    if not wait_until(lambda: net.connects("127.0.0.1", 111), 10):
        raise LabError(f"rpcbind doesn't answer{net.tail(LAB / 'rpcbind.log')}")


def stop() -> None:
    """At once, as a power cut would: answers that did not get through are lost. What it wrote is on its disk."""
    net.end("ganesha.nfsd", "-f", str(_CONF))
    if not wait_until(lambda: not net.unsent(PORT), 20):
        raise LabError("the kernel goes on sending what the NFS server left")


def pid() -> int | None:
    return next(net.running("ganesha.nfsd", "-f", str(_CONF)), None)


def answers() -> bool:
    return net.connects(net.SERVER, PORT)
