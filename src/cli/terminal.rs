//! What people see: progress, notes and warnings on stderr, text and tables on stdout.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::recipes::report::{Event, Progress, Report};

/// Shows events as they come: a bar where there is a terminal, a plain line every so often where there is none.
pub struct Terminal {
    bar: Option<ProgressBar>,
    on_terminal: bool,
    last_line: Instant,
    last_validation: Option<f64>,
    /// Whether streamed text goes to stdout; with --json it is in the document instead.
    stream: bool,
}

/// Time between plain lines.
const EVERY: Duration = Duration::from_secs(10);

impl Terminal {
    pub fn new(stream: bool) -> Self {
        let long_ago = Instant::now().checked_sub(EVERY).unwrap_or_else(Instant::now);
        let on_terminal = std::io::stderr().is_terminal();
        Self { bar: None, on_terminal, last_line: long_ago, last_validation: None, stream }
    }

    /// A line above the bar, or just a line.
    fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => eprintln!("{text}"),
        }
    }

    fn step(&mut self, p: Progress) {
        self.last_validation = p.val_loss.or(self.last_validation);
        let validation = self.last_validation.map_or(String::new(), |v| format!(" val {v:.4}"));
        let text = format!(
            "loss {:.4}{validation} lr {:.1e} {:.0} tok/s {} left{}",
            p.loss,
            p.learning_rate,
            p.tokens_per_second,
            duration(p.seconds_left),
            if p.skipped { " (skipped)" } else { "" },
        );
        if self.on_terminal {
            let bar = self.bar.get_or_insert_with(|| {
                let bar = ProgressBar::with_draw_target(Some(p.steps), ProgressDrawTarget::stderr_with_hz(8));
                // wide_msg cuts the message to what the line has room for, so the bar never takes two.
                let style = ProgressStyle::with_template("{pos}/{len} [{bar:16}] {wide_msg}");
                bar.set_style(style.expect("the template is constant").progress_chars("=> "));
                bar
            });
            bar.set_message(text);
            bar.set_position(p.step);
        } else if p.val_loss.is_some() || p.skipped || p.step == p.steps || self.last_line.elapsed() >= EVERY {
            self.last_line = Instant::now();
            eprintln!("step {}/{} {text}", p.step, p.steps);
        }
    }

    /// Leaves the bar as it stands, for what is printed next.
    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.abandon();
        }
    }
}

impl Report for Terminal {
    fn event(&mut self, event: Event) {
        match event {
            Event::Note(text) => self.line(&text),
            Event::Warning(text) => self.line(&format!("warning: {text}")),
            Event::Step(progress) => self.step(progress),
            Event::Saved(_) => {}
            Event::Text(text) if self.stream => out(&text),
            Event::Text(_) => {}
        }
    }
}

/// Writes to stdout and shows it at once. Whoever closed the pipe has seen enough: that ends the program quietly.
pub fn out(text: &str) {
    let mut stdout = std::io::stdout().lock();
    if stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).is_err() {
        std::process::exit(0);
    }
}

/// "1h02m", "3m20s", "45s".
pub fn duration(seconds: f64) -> String {
    let s = if seconds.is_finite() { seconds.max(0.0).round() as u64 } else { 0 };
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m{:02}s", s / 60, s % 60),
        _ => format!("{}h{:02}m", s / 3600, s / 60 % 60),
    }
}

/// "12.3 MB".
pub fn bytes(n: u64) -> String {
    let n = n as f64;
    match n {
        1e9.. => format!("{:.1} GB", n / 1e9),
        1e6.. => format!("{:.1} MB", n / 1e6),
        1e3.. => format!("{:.1} kB", n / 1e3),
        _ => format!("{n} bytes"),
    }
}

/// "10.7 M".
pub fn count(n: usize) -> String {
    let n = n as f64;
    match n {
        1e9.. => format!("{:.2} G", n / 1e9),
        1e6.. => format!("{:.2} M", n / 1e6),
        1e3.. => format!("{:.1} k", n / 1e3),
        _ => format!("{n}"),
    }
}
