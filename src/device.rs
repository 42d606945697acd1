//! This machine: its memory, its cores, and which device a run takes and why. Called by cli and the recipes.
//!
//! With the ops, the only place that may ask which platform this is.

use crate::error::{Error, Result, nearest};
use crate::ops::gpu;

/// Main memory in bytes, all of it and what can be taken now without swapping, within the limits of a container if this is
/// one; zeros where the system does not tell.
pub fn memory() -> (u64, u64) {
    let Ok(mut system) = sysinfo::System::new() else { return (0, 0) };
    system.refresh_memory();
    let (total, available) = (system.total_memory(), system.available_memory());
    match system.cgroup_limits() {
        Some(limits) if limits.total_memory > 0 => (total.min(limits.total_memory), available.min(limits.free_memory)),
        _ => (total, available),
    }
}

/// The most memory that this process has held so far, in bytes; 0 where the system does not tell.
pub fn peak_memory() -> u64 {
    use nix::sys::resource::{UsageWho, getrusage};
    let peak = getrusage(UsageWho::RUSAGE_SELF).map_or(0, |usage| usage.max_rss());
    // Linux counts kibibytes, macOS bytes.
    let unit = if cfg!(target_os = "macos") { 1 } else { 1024 };
    u64::try_from(peak).unwrap_or(0) * unit
}

/// The kinds of device that there are names for; a build has some of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Cpu,
    Metal,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Cpu => "cpu",
            Kind::Metal => "metal",
        }
    }
}

/// What a run computes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    pub kind: Kind,
    /// Why, as a sentence for the user.
    pub reason: String,
    /// Whether there would be a better device, were it not for the reason.
    pub fallback: bool,
}

/// The device of that name (`auto`, `cpu`, `cuda`, `metal`), or an error if this build does not have it.
pub fn choose(name: &str) -> Result<Choice> {
    let choice = |kind, reason: &str, fallback| Ok(Choice { kind, reason: reason.into(), fallback });
    match (name, gpu::missing()) {
        ("cpu", _) => choice(Kind::Cpu, "asked for", false),
        ("metal", None) => choice(Kind::Metal, "asked for", false),
        ("auto", None) => choice(Kind::Metal, "the GPU of this Mac", false),
        ("auto", Some(reason)) if cfg!(target_os = "macos") => choice(Kind::Cpu, &reason, true),
        ("auto", Some(_)) => choice(Kind::Cpu, "the only device of this build", false),
        ("metal", Some(reason)) if cfg!(target_os = "macos") => {
            Err(Error::usage(reason).with_hint("leave --device out, or use --device cpu"))
        }
        ("cuda" | "metal", _) => Err(Error::usage(format!("this build has no `{name}` device"))
            .with_hint("leave --device out, or use --device cpu")),
        _ => {
            let near = nearest(name, ["auto", "cpu", "cuda", "metal"]);
            let hint = near.unwrap_or_else(|| "one of: auto, cpu, metal".into());
            Err(Error::usage(format!("unknown device `{name}`")).with_hint(hint))
        }
    }
}

/// Makes the chosen device that of this process; before any tensor is made.
pub fn start(choice: &Choice) -> Result<()> {
    match choice.kind {
        Kind::Cpu => Ok(()),
        Kind::Metal => gpu::start(),
    }
}

/// How many threads a run uses: as many as asked for, or the cores that the system gives this process.
pub fn threads(asked: Option<usize>) -> Result<usize> {
    const MOST: usize = 1024;
    match asked {
        Some(n) if n == 0 || n > MOST => {
            Err(Error::usage(format!("--threads {n}"))
                .with_hint(format!("use 1 to {MOST}, or leave it out for all cores")))
        }
        Some(n) => Ok(n),
        None => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_in_bytes() {
        let (total, available) = memory();
        assert!(total > 64 << 20, "{total}");
        assert!(available <= total);
    }

    #[test]
    fn peak_memory_sees_what_was_touched() {
        let before = peak_memory();
        assert!(before > 1 << 20, "a test binary holds more than a mebibyte, not {before} bytes");
        let touched = std::hint::black_box(vec![1u8; 256 << 20]);
        assert!(peak_memory() >= 256 << 20, "{} bytes", peak_memory());
        drop(touched);
    }

    #[test]
    fn devices_that_this_build_lacks_are_told_apart_from_typing_errors() {
        assert_eq!(choose("auto").unwrap().kind, Kind::Cpu);
        assert_eq!(choose("cpu").unwrap().reason, "asked for");
        assert!(choose("cuda").unwrap_err().to_string().contains("no `cuda`"));
        assert!(choose("cpuu").unwrap_err().hint().unwrap().contains("`cpu`"));
    }

    #[test]
    fn threads_are_all_cores_unless_asked() {
        assert!(threads(None).unwrap() >= 1);
        assert_eq!(threads(Some(3)).unwrap(), 3);
        assert_eq!(threads(Some(0)).unwrap_err().exit_code(), 2);
        assert_eq!(threads(Some(1 << 20)).unwrap_err().exit_code(), 2);
    }
}
