//! The machine: which device computes, how much memory there is, how much this process has used. A leaf.

use crate::error::{Error, Result};

/// The device of that name and why it was chosen.
pub fn choose(name: &str) -> Result<&'static str> {
    match name {
        "auto" | "cpu" => Ok("cpu"),
        "cuda" | "metal" => {
            Err(Error::usage(format!("this build has no {name} back end")).with_hint("use --device cpu"))
        }
        _ => Err(Error::usage(format!("unknown device `{name}`")).with_hint("one of: auto, cpu")),
    }
}

/// Bytes of memory of the machine, and of those not in use.
pub fn memory() -> (u64, u64) {
    let system = sysinfo::System::new_with_specifics(
        sysinfo::RefreshKind::nothing().with_memory(sysinfo::MemoryRefreshKind::everything()),
    );
    system.map_or((0, 0), |system| (system.total_memory(), system.available_memory()))
}

/// The most memory this process has held so far, in bytes.
pub fn peak_memory() -> u64 {
    let unit = if cfg!(target_os = "macos") { 1 } else { 1024 };
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF);
    usage.map_or(0, |usage| usage.max_rss() as u64 * unit)
}

/// Threads to compute with when none are asked for.
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
