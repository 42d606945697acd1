//! A few threads that work on one thing at a time, for ops that take only microseconds: the hand-off costs a fraction of
//! what a pool with queues takes. Called by the decode ops; training's ops, which last longer, use rayon.
//!
//! A job is a number of tasks; each thread, the caller included, has a fixed share of them, so that what it reads stays in
//! its core's cache from one job to the next. The caller also does the share of a helper that does not wake in time.
//! Between jobs a helper watches its slot for `PATIENCE` and then sleeps, so that an idle engine costs nothing. Which
//! thread runs which task changes no result.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering::*, fence};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a helper watches before it sleeps: several steps of a small model.
const PATIENCE: Duration = Duration::from_micros(200);
/// Looks at a slot before the clock is read, or the core given away that the other thread may need.
const LOOKS: u32 = 512;

type Task<'a> = &'a (dyn Fn(usize) + Sync);

/// States of a slot. A share is `POSTED` by the caller, `TAKEN` by whoever does it, and then `DONE`.
const DONE: u32 = 0;
const POSTED: u32 = 1;
const TAKEN: u32 = 2;

/// A helper's mailbox, on a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
struct Slot(AtomicU32);

struct Shared {
    slots: Vec<Slot>,
    /// The job: where its `Task` lies, and its tasks. Written while every slot is `DONE`, read by who has taken a share.
    task: AtomicPtr<Task<'static>>,
    tasks: AtomicUsize,
    panicked: AtomicBool,
    sleepers: AtomicUsize,
    quit: AtomicBool,
}

/// The helpers of one engine.
pub struct Team {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    threads: Vec<Thread>,
    /// Held while a job runs: a second caller does its tasks alone.
    busy: Mutex<()>,
    /// Nanoseconds from posting a share to seeing it done: twice the way of a cache line between two cores, which is 30 ns
    /// or 1000 depending on where the system put the threads.
    handoff: f64,
}

impl Team {
    /// A team of `threads` threads, the caller being one.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            slots: (1..threads.max(1)).map(|_| Slot::default()).collect(),
            task: AtomicPtr::default(),
            tasks: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            quit: AtomicBool::new(false),
        });
        let helper = |i: usize| {
            let shared = Arc::clone(&shared);
            let named = std::thread::Builder::new().name(format!("team-{i}"));
            // Where the system gives fewer threads, the caller does the shares of those that are missing.
            named.spawn(move || shared.help(i)).ok()
        };
        let helpers: Vec<JoinHandle<()>> = (0..shared.slots.len()).map_while(helper).collect();
        let threads = helpers.iter().map(|h| h.thread().clone()).collect();
        let mut team = Self { shared, helpers, threads, busy: Mutex::new(()), handoff: 0.0 };
        team.handoff = team.measure();
        team
    }

    /// The median time of a hand-off of nothing.
    fn measure(&self) -> f64 {
        let mut nothing: Task = &|_| ();
        self.shared.tasks.store(0, Relaxed);
        self.shared.task.store((&raw mut nothing).cast(), Relaxed);
        let mut times: Vec<Duration> = (0..65)
            .map(|_| {
                let start = Instant::now();
                self.post();
                (0..self.helpers.len()).for_each(|i| self.shared.wait(i));
                start.elapsed()
            })
            .collect();
        times.sort();
        times[times.len() / 2].as_nanos() as f64
    }

    /// Whether work of so many nanoseconds on one thread ends sooner on all of them: beside the hand-off, what the threads
    /// wrote has to move between their cores.
    pub fn is_worth(&self, nanoseconds: f64) -> bool {
        let saved = nanoseconds - nanoseconds / self.threads() as f64;
        saved > 3.0 * self.handoff
    }

    /// How many threads work on a job.
    pub fn threads(&self) -> usize {
        1 + self.helpers.len()
    }

    /// Runs `task` for every number below `tasks`, and returns when all are done. A panic in one is passed on.
    pub fn run(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        if tasks < 2 || self.helpers.is_empty() {
            return (0..tasks).for_each(task);
        }
        let Ok(free) = self.busy.try_lock() else { return (0..tasks).for_each(task) };
        let mut job: Task = &task;
        let shared = &*self.shared;
        shared.tasks.store(tasks, Relaxed);
        shared.task.store((&raw mut job).cast(), Relaxed);
        self.post();
        shared.share(0);
        for i in 0..shared.slots.len() {
            shared.take(i);
            shared.wait(i);
        }
        if shared.panicked.swap(false, Relaxed) {
            drop(free);
            resume_unwind(Box::new("a task of the team panicked"));
        }
    }
}

impl Team {
    /// Offers every helper its share; what was stored before is seen by whoever takes one.
    fn post(&self) {
        self.shared.slots.iter().for_each(|slot| slot.0.store(POSTED, Release));
        // A helper announces its sleep and then looks at its slot once more; with the fences one of us sees the other.
        fence(SeqCst);
        if self.shared.sleepers.load(Relaxed) > 0 {
            self.threads.iter().for_each(Thread::unpark);
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.quit.store(true, SeqCst);
        self.threads.iter().for_each(Thread::unpark);
        for helper in self.helpers.drain(..) {
            // A helper ends without a value; its panics were caught and passed on.
            let _ = helper.join();
        }
    }
}

impl Shared {
    /// Runs the tasks of one thread; 0 is the caller.
    fn share(&self, thread: usize) {
        let (threads, tasks) = (self.slots.len() + 1, self.tasks.load(Relaxed));
        // SAFETY: the caller of `run` is here itself, or waits until the slot of this share is `DONE`: the closure is alive.
        let task = unsafe { *self.task.load(Relaxed) };
        let run = || (thread * tasks / threads..(thread + 1) * tasks / threads).for_each(task);
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            self.panicked.store(true, Relaxed);
        }
    }

    /// Does the share of helper `i` if it waits for somebody; whether it did.
    fn take(&self, i: usize) -> bool {
        let slot = &self.slots[i].0;
        if slot.load(Relaxed) != POSTED || slot.compare_exchange(POSTED, TAKEN, Acquire, Relaxed).is_err() {
            return false;
        }
        self.share(i + 1);
        slot.store(DONE, Release);
        true
    }

    /// Waits until the share of helper `i` is done.
    fn wait(&self, i: usize) {
        let mut looks = 0;
        while self.slots[i].0.load(Acquire) != DONE {
            std::hint::spin_loop();
            looks += 1;
            if looks % LOOKS == 0 {
                std::thread::yield_now();
            }
        }
    }

    /// A helper's life.
    fn help(&self, i: usize) {
        while !self.quit.load(Relaxed) {
            if self.take(i) || self.watch(i) {
                continue;
            }
            self.sleepers.fetch_add(1, Relaxed);
            fence(SeqCst);
            if self.slots[i].0.load(Relaxed) != POSTED && !self.quit.load(Relaxed) {
                std::thread::park();
            }
            self.sleepers.fetch_sub(1, Relaxed);
        }
    }

    /// Waits for a share; false if none came in time.
    fn watch(&self, i: usize) -> bool {
        let start = Instant::now();
        loop {
            for _ in 0..LOOKS {
                if self.slots[i].0.load(Relaxed) == POSTED {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() > PATIENCE || self.quit.load(Relaxed) {
                return false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_whatever_the_sizes() {
        for threads in [1, 2, 3, 8] {
            let team = Team::new(threads);
            for round in 0..2000 {
                let tasks = round % 13;
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                team.run(tasks, |i| {
                    counts[i].fetch_add(1, Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Relaxed) == 1), "{threads} threads, {tasks} tasks");
                if round % 500 == 0 {
                    // Long enough for the helpers to fall asleep.
                    std::thread::sleep(2 * PATIENCE);
                }
            }
        }
    }

    #[test]
    fn a_panic_is_passed_on_and_the_team_goes_on() {
        let team = Team::new(3);
        for _ in 0..50 {
            let failed = catch_unwind(AssertUnwindSafe(|| team.run(9, |i| assert_ne!(i, 4, "as planned"))));
            assert!(failed.is_err());
            let sum = AtomicUsize::new(0);
            team.run(9, |i| {
                sum.fetch_add(i, Relaxed);
            });
            assert_eq!(sum.load(Relaxed), 36);
        }
    }

    #[test]
    fn two_callers_and_a_task_that_calls_again_get_through() {
        let (team, sum) = (Team::new(2), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        team.run(4, |_| {
                            team.run(2, |_| {
                                sum.fetch_add(1, Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(sum.load(Relaxed), 2 * 500 * 8);
    }
}
