//! A few threads that do one job together, phase by phase, for work that takes only microseconds: a forward pass of the
//! engine is one job, and between its ops the threads wait for each other without going through a queue. Training's ops,
//! which last longer, use rayon.
//!
//! Each member has a fixed share of every phase, so that what it reads stays in its core's cache from one job to the next.
//! A helper that does not join in time is left out of the job. Between jobs it watches its slot for `PATIENCE` and then
//! sleeps, so that an idle engine costs nothing. Who does which share changes no result.

use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering::*, fence};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a helper watches before it sleeps: several steps of a small model.
const PATIENCE: Duration = Duration::from_micros(200);
/// Looks at a slot before the clock is read, or the core given away that the other thread may need.
const LOOKS: u32 = 512;

type Work<'a> = &'a (dyn Fn(&Member) + Sync);

/// States of a slot. A job is `POSTED` by the caller and `TAKEN` by the helper, or withdrawn; it is told to `GO` when the
/// members are known, and leaves the slot `FREE`.
const FREE: u32 = 0;
const POSTED: u32 = 1;
const TAKEN: u32 = 2;
const GO: u32 = 3;

/// A number on a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU32);

struct Shared {
    /// A helper's mailbox.
    slots: Vec<Line>,
    /// The number that a helper has in the job, from 1 on: the caller is 0.
    numbers: Vec<AtomicUsize>,
    /// How many phases each member has ended.
    phases: Vec<Line>,
    /// The job: where its `Work` lies, and how many do it. Read by helpers that were told to go.
    work: AtomicPtr<Work<'static>>,
    members: AtomicUsize,
    panicked: AtomicBool,
    sleepers: AtomicUsize,
    quit: AtomicBool,
}

/// The helpers of one engine.
pub struct Team {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    threads: Vec<Thread>,
    /// Held while a job runs: a second caller does its work alone.
    busy: Mutex<()>,
    /// Nanoseconds that a phase's end takes when nobody is late: the way of a cache line between two cores and back, which
    /// is 60 ns or 1000 depending on where the system put the threads.
    handoff: f64,
}

/// One thread's part in a job.
pub struct Member<'a> {
    index: usize,
    count: usize,
    ended: Cell<u32>,
    shared: Option<&'a Shared>,
}

impl Member<'_> {
    /// Who does all the work himself.
    pub fn alone() -> Self {
        Self { index: 0, count: 1, ended: Cell::new(0), shared: None }
    }

    pub fn index(&self) -> usize {
        self.index
    }

    /// This member's share of so many tasks. The shares of all members are the tasks, in order.
    pub fn share(&self, tasks: usize) -> Range<usize> {
        self.index * tasks / self.count..(self.index + 1) * tasks / self.count
    }

    /// Ends a phase: returns when every member has ended it, and then sees all that they wrote in it.
    pub fn sync(&self) {
        let Some(shared) = self.shared else { return };
        let ended = self.ended.get() + 1;
        self.ended.set(ended);
        shared.phases[self.index].0.store(ended, Release);
        for other in (0..self.count).filter(|other| *other != self.index) {
            wait(|| shared.phases[other].0.load(Acquire) >= ended || shared.given_up());
        }
    }
}

/// Returns when `done` holds.
fn wait(done: impl Fn() -> bool) {
    let mut looks = 0;
    while !done() {
        std::hint::spin_loop();
        looks += 1;
        if looks % LOOKS == 0 {
            std::thread::yield_now();
        }
    }
}

impl Team {
    /// A team of `threads` threads, the caller being one.
    pub fn new(threads: usize) -> Self {
        let helpers = threads.max(1) - 1;
        let shared = Arc::new(Shared {
            slots: (0..helpers).map(|_| Line::default()).collect(),
            numbers: (0..helpers).map(|_| AtomicUsize::new(0)).collect(),
            phases: (0..=helpers).map(|_| Line::default()).collect(),
            work: AtomicPtr::default(),
            members: AtomicUsize::new(1),
            panicked: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            quit: AtomicBool::new(false),
        });
        let helper = |i: usize| {
            let shared = Arc::clone(&shared);
            let named = std::thread::Builder::new().name(format!("team-{i}"));
            // Where the system gives fewer threads, jobs are done by those that there are.
            named.spawn(move || shared.help(i)).ok()
        };
        let helpers: Vec<JoinHandle<()>> = (0..helpers).map_while(helper).collect();
        let threads = helpers.iter().map(|h| h.thread().clone()).collect();
        let mut team = Self { shared, helpers, threads, busy: Mutex::new(()), handoff: 0.0 };
        team.handoff = team.measure();
        team
    }

    /// The median time of a phase of nothing.
    fn measure(&self) -> f64 {
        const PHASES: u32 = 16;
        let mut times: Vec<Duration> = (0..65)
            .map(|_| {
                let start = Instant::now();
                self.together(1e6, |member| (0..PHASES).for_each(|_| member.sync()));
                start.elapsed() / PHASES
            })
            .collect();
        times.sort();
        times[times.len() / 2].as_nanos() as f64
    }

    /// How many threads there are for a job.
    pub fn threads(&self) -> usize {
        1 + self.helpers.len()
    }

    /// Runs `work`, which takes so many nanoseconds on one thread and has so many phases, on all threads if it ends sooner
    /// that way: beside the wait at its end, what the members wrote in a phase has to move between their cores.
    pub fn run(&self, nanoseconds: f64, phases: usize, work: impl Fn(&Member) + Sync) {
        let saved = nanoseconds - nanoseconds / self.threads() as f64;
        if saved > 2.0 * self.handoff * phases as f64 {
            self.together(nanoseconds, work)
        } else {
            work(&Member::alone())
        }
    }

    /// Runs `work` on all threads that join before a quarter of its time has passed, and returns when all are done with it.
    /// A panic in one is passed on.
    fn together(&self, nanoseconds: f64, work: impl Fn(&Member) + Sync) {
        if self.helpers.is_empty() {
            return work(&Member::alone());
        }
        let Ok(free) = self.busy.try_lock() else { return work(&Member::alone()) };
        let mut job: Work = &work;
        let shared = &*self.shared;
        shared.work.store((&raw mut job).cast(), Relaxed);
        self.post();
        let members = self.gather(Duration::from_nanos((nanoseconds / 4.0) as u64));
        shared.run(0, members);
        for slot in &shared.slots {
            wait(|| slot.0.load(Acquire) == FREE);
        }
        if shared.panicked.swap(false, Relaxed) {
            drop(free);
            resume_unwind(Box::new("a member of the team panicked"));
        }
    }

    /// Offers every helper the job.
    fn post(&self) {
        self.shared.slots[..self.helpers.len()].iter().for_each(|slot| slot.0.store(POSTED, Relaxed));
        // A helper announces its sleep and then looks at its slot once more; with the fences one of us sees the other.
        fence(SeqCst);
        if self.shared.sleepers.load(Relaxed) > 0 {
            self.threads.iter().for_each(Thread::unpark);
        }
    }

    /// Waits for helpers, numbers those that came, withdraws the offer from the others, and starts the job; how many do it.
    fn gather(&self, patience: Duration) -> usize {
        let shared = &*self.shared;
        let (start, mut looks) = (Instant::now(), 0);
        let waiting = || shared.slots.iter().any(|slot| slot.0.load(Relaxed) == POSTED);
        while waiting() && (looks % 64 != 0 || start.elapsed() < patience) {
            std::hint::spin_loop();
            looks += 1;
        }
        let mut members = 1;
        for (slot, number) in shared.slots.iter().zip(&shared.numbers) {
            let withdrawn = slot.0.compare_exchange(POSTED, FREE, Relaxed, Relaxed);
            if withdrawn == Err(TAKEN) {
                number.store(members, Relaxed);
                members += 1;
            }
        }
        shared.phases.iter().for_each(|phase| phase.0.store(0, Relaxed));
        shared.members.store(members, Relaxed);
        for slot in shared.slots.iter().filter(|slot| slot.0.load(Relaxed) == TAKEN) {
            slot.0.store(GO, Release);
        }
        members
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

/// What a member that waits for one that panicked unwinds with.
struct GivenUp;

impl Shared {
    /// Does the share of member `index` of `count`.
    fn run(&self, index: usize, count: usize) {
        // SAFETY: the caller of `together` is here itself, or waits until this helper's slot is `FREE`: the closure is alive.
        let work = unsafe { *self.work.load(Relaxed) };
        let member = Member { index, count, ended: Cell::new(0), shared: (count > 1).then_some(self) };
        if catch_unwind(AssertUnwindSafe(|| work(&member))).is_err() {
            self.panicked.store(true, Relaxed);
        }
    }

    /// Whether somebody panicked: then so does who waits for him, in silence.
    fn given_up(&self) -> bool {
        if self.panicked.load(Relaxed) {
            resume_unwind(Box::new(GivenUp));
        }
        false
    }

    /// Joins a job if one is offered to helper `i`; whether it did.
    fn join(&self, i: usize) -> bool {
        let slot = &self.slots[i].0;
        if slot.load(Relaxed) != POSTED || slot.compare_exchange(POSTED, TAKEN, Relaxed, Relaxed).is_err() {
            return false;
        }
        wait(|| slot.load(Acquire) == GO);
        self.run(self.numbers[i].load(Relaxed), self.members.load(Relaxed));
        slot.store(FREE, Release);
        true
    }

    /// A helper's life.
    fn help(&self, i: usize) {
        while !self.quit.load(Relaxed) {
            if self.join(i) || self.watch(i) {
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

    /// Waits for a job; false if none came in time.
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

    /// A job in which each phase reads what the others wrote in the one before.
    fn relay(team: &Team, phases: usize) {
        let counts: Vec<AtomicUsize> = (0..13).map(|_| AtomicUsize::new(0)).collect();
        team.together(1e5, |member| {
            for phase in 0..phases {
                for i in member.share(counts.len()) {
                    counts[i].fetch_add(1, Relaxed);
                }
                member.sync();
                assert!(counts.iter().all(|c| c.load(Relaxed) == phase + 1), "a phase began before the last one's end");
                member.sync();
            }
        });
        assert!(counts.iter().all(|c| c.load(Relaxed) == phases));
    }

    #[test]
    fn every_task_runs_once_and_phases_do_not_overlap() {
        for threads in [1, 2, 3, 8] {
            let team = Team::new(threads);
            for round in 0..500 {
                relay(&team, round % 7);
                if round % 100 == 0 {
                    // Long enough for the helpers to fall asleep.
                    std::thread::sleep(2 * PATIENCE);
                }
            }
        }
    }

    #[test]
    fn a_panic_is_passed_on_and_the_team_goes_on() {
        let team = Team::new(3);
        for round in 0..50 {
            let failed = catch_unwind(AssertUnwindSafe(|| {
                team.together(1e6, |member| {
                    member.sync();
                    assert_ne!(member.index(), round % member.count, "as planned");
                    member.sync();
                })
            }));
            assert!(failed.is_err());
            relay(&team, 3);
        }
    }

    #[test]
    fn two_callers_and_a_job_that_starts_another_get_through() {
        let (team, sum) = (Team::new(2), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        team.together(1e5, |member| {
                            let share = member.share(8).len();
                            // Alone or not, the inner members share it once more.
                            team.together(1e5, |inner| {
                                sum.fetch_add(inner.share(share).len(), Relaxed);
                            });
                            member.sync();
                        });
                    }
                });
            }
        });
        assert_eq!(sum.load(Relaxed), 2 * 500 * 8);
    }
}
