//! What people see while a command runs: progress, notes and warnings on stderr; and the two ways to write, `out` and `err`.

use std::io::{ErrorKind, IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::show::{bytes, duration, rate};
use crate::recipes::report::{Event, Preparation, Report, StepProgress};
use crate::recipes::sample::SampledRow;

/// Shows events as they come: a bar where there is a terminal, a plain line every so often where there is none.
pub struct Terminal {
    bar: Option<ProgressBar>,
    on_terminal: bool,
    /// When the last plain line was written; none yet.
    last_line: Option<Instant>,
    last_validation: Option<f64>,
    stream: Stream,
}

/// Where made text goes.
enum Stream {
    /// Nowhere: with --json it is in the document.
    Off,
    /// To stdout as it comes, after this text, which it continues.
    Texts(String),
    /// Rows go to stdout when they are whole.
    JsonLines,
}

/// Time between plain lines.
const EVERY: Duration = Duration::from_secs(10);

impl Terminal {
    pub fn new() -> Self {
        let on_terminal = std::io::stderr().is_terminal() && !dumb();
        Self { bar: None, on_terminal, last_line: None, last_validation: None, stream: Stream::Off }
    }

    /// A terminal whose stdout gets the rows as text, each after its prompt.
    pub fn texts() -> Self {
        Self { stream: Stream::Texts(String::new()), ..Self::new() }
    }

    /// A terminal whose stdout gets each row as a JSON document on a line.
    pub fn json_lines() -> Self {
        Self { stream: Stream::JsonLines, ..Self::new() }
    }

    fn text(&mut self, text: &str) {
        if let Stream::Texts(before) = &mut self.stream {
            out(&(std::mem::take(before) + text));
        }
    }

    /// A row begins: its number if there are several, and its prompt together with the first of its text.
    fn row(&mut self, number: usize, of: usize, prompt: String) {
        if let Stream::Texts(before) = &mut self.stream {
            let gap = if number > 0 { "\n" } else { "" };
            let header = if of > 1 { format!("{gap}--- {} of {of} ---\n", number + 1) } else { String::new() };
            *before = header + &prompt;
        }
    }

    fn row_end(&mut self, row: &SampledRow) {
        match self.stream {
            Stream::Off => {}
            Stream::Texts(_) => self.text("\n"),
            Stream::JsonLines => out(&(serde_json::to_string(row).expect("plain values") + "\n")),
        }
    }

    /// A line above the bar, or just a line.
    fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => err(text),
        }
    }

    fn step(&mut self, p: StepProgress) {
        self.last_validation = p.val_loss.or(self.last_validation);
        let text = fields(&p, self.last_validation);
        if self.on_terminal {
            let bar = self.bar.get_or_insert_with(|| bar(p.steps));
            bar.set_message(text);
            bar.set_position(p.step);
            return;
        }
        let due = self.last_line.is_none_or(|at| at.elapsed() >= EVERY);
        if due || p.val_loss.is_some() || p.skipped || p.step == p.steps {
            self.last_line = Some(Instant::now());
            err(&format!("step {}/{} {text}", p.step, p.steps));
        }
    }

    /// A bar of bytes with their speed and the time left; without a terminal a line when it begins and every so often.
    fn prepare(&mut self, preparation: Option<Preparation>) {
        let Some(Preparation { what, done, total }) = preparation else {
            // Preparation is over, but what comes next may be the bar of a run.
            self.bar.take().into_iter().for_each(|bar| bar.finish_and_clear());
            self.last_line = None;
            return;
        };
        if self.on_terminal {
            let bar = self.bar.get_or_insert_with(|| bytes_bar(total));
            bar.set_message(what);
            bar.set_position(done);
            return;
        }
        // Short work is done before anybody reads of it.
        let due = self.last_line.is_some_and(|at| at.elapsed() >= EVERY);
        if self.last_line.is_none() || due {
            self.last_line = Some(Instant::now());
            if due {
                let of = total.map_or(String::new(), |total| format!(" of {}", bytes(total)));
                err(&format!("{what}: {}{of}", bytes(done)));
            }
        }
    }

    /// Leaves the bar as it stands, for what is printed next.
    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.abandon();
            // The cursor still stands at the bar's end.
            err("");
        }
    }
}

impl Report for Terminal {
    fn event(&mut self, event: Event) {
        match event {
            Event::Note(text) => self.line(&text),
            Event::Warning(text) => self.line(&format!("{} {text}", paint("33;1", "warning:"))),
            Event::Step(progress) => self.step(progress),
            Event::Preparing(preparation) => self.prepare(preparation),
            Event::Saved(_) => {}
            Event::Row { number, of, prompt } => self.row(number, of, prompt),
            Event::Text(text) => self.text(&text),
            Event::RowEnd(row) => self.row_end(&row),
        }
    }
}

/// One line at any width: `wide_msg` cuts the fields at the terminal's edge, so the least important ones come last.
fn bar(steps: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr_with_hz(8));
    let style = ProgressStyle::with_template("{pos}/{len} {bar:10} {wide_msg}").expect("the template is constant");
    bar.set_style(style.progress_chars("█▌░"));
    bar
}

fn bytes_bar(total: Option<u64>) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr_with_hz(8));
    let template = match total {
        Some(_) => "{bar:10} {bytes}/{total_bytes} {bytes_per_sec} {eta} left {wide_msg}",
        None => "{bytes} {bytes_per_sec} {wide_msg}",
    };
    let style = ProgressStyle::with_template(template).expect("the templates are constant");
    bar.set_style(style.progress_chars("█▌░"));
    bar
}

/// Loss, validation loss, time left, speed, learning rate: all of them fit beside five-digit steps in 80 columns.
fn fields(p: &StepProgress, validation: Option<f64>) -> String {
    let validation = validation.map_or(String::new(), |v| format!(" val {v:.4}"));
    format!(
        "loss {:.4}{validation} {} left {} tok/s lr {:.1e}{}",
        p.loss,
        duration(p.seconds_left),
        rate(p.tokens_per_second),
        p.learning_rate,
        if p.skipped { " skipped" } else { "" },
    )
}

/// Writes to stdout and shows it at once. A reader that left has seen enough: that ends the program quietly. Any other
/// failure (a full disk behind a redirection) ends it with an error.
pub fn out(text: &str) {
    let mut stdout = std::io::stdout().lock();
    if let Err(error) = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        if error.kind() == ErrorKind::BrokenPipe {
            std::process::exit(0);
        }
        err(&format!("{} writing to standard output: {error}", paint("31;1", "error:")));
        std::process::exit(1);
    }
}

/// Writes a line to stderr. If that is closed there is nobody left to tell.
pub fn err(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Colours a word for stderr, if that is a terminal and nobody objects (no-color.org).
pub fn paint(code: &str, word: &str) -> String {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if plain || dumb() || !std::io::stderr().is_terminal() {
        return word.to_owned();
    }
    format!("\x1b[{code}m{word}\x1b[0m")
}

fn dumb() -> bool {
    std::env::var_os("TERM").is_some_and(|term| term == "dumb")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_fits_beside_five_digit_steps_in_80_columns() {
        let progress = StepProgress {
            step: 10_000,
            steps: 20_000,
            loss: 10.1234,
            val_loss: None,
            learning_rate: 5.7e-4,
            skipped: false,
            tokens_per_second: 25_432.1,
            seconds_left: 12_345.0,
        };
        let text = fields(&progress, Some(1.23456));
        assert_eq!(text, "loss 10.1234 val 1.2346 3h25m left 25.4k tok/s lr 5.7e-4");
        assert!("10000/20000 ██████████ ".chars().count() + text.len() <= 80);
    }
}
