//! The terminal: flags in, recipes run, results shown. The only place that prints.
//!
//! Exit codes: 0 done, 1 failed, 2 not understood, 130 left at once by Ctrl-C. Whatever goes wrong is one message on stderr,
//! `error:` and, where there is one, `hint:`; never a backtrace.

mod args;
mod commands;
mod flags;
mod interactive;
pub mod reference;
mod show;
mod terminal;

use std::process::ExitCode;

use clap::Parser;

use crate::error::Error;
use crate::recipes::report::Interrupt;
use args::{Cli, Command};
use terminal::{err, paint};

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    std::panic::set_hook(Box::new(panicked));
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // A reader that left early is no failure.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    let interrupt = interrupt(&cli.command);
    match std::panic::catch_unwind(|| commands::run(cli, &interrupt)) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            show_error(&error);
            ExitCode::from(error.exit_code())
        }
        Err(_) => ExitCode::from(1),
    }
}

fn show_error(error: &Error) {
    err(&format!("{} {error}", paint("31;1", "error:")));
    if let Some(hint) = error.hint() {
        err(&format!("\n{} {hint}", paint("32", "hint:")));
    }
}

/// A panic is a defect; its place and message are one line that a report can quote.
fn panicked(info: &std::panic::PanicHookInfo) {
    let message = info.payload_as_str().unwrap_or("no message").replace('\n', " ");
    let place = info.location().map_or(String::new(), |at| format!(" ({}:{})", at.file(), at.line()));
    show_error(&Error::Failed {
        what: format!("gpt met a defect of its own: {message}{place}"),
        hint: Some("saved states are intact; please report this".into()),
    });
}

/// For commands that end in order, Ctrl-C asks for that; a second one, or the first in any other command, leaves at once.
/// That loses nothing, since whatever is saved appears by rename.
fn interrupt(command: &Command) -> Interrupt {
    let interrupt = Interrupt::default();
    let notice = match command {
        Command::Train(_) | Command::Distill(_) => {
            Some("\nfinishing this step and saving; Ctrl-C again leaves at once")
        }
        Command::Sample(_) => None,
        _ => return interrupt,
    };
    let seen = interrupt.clone();
    // Without a handler Ctrl-C still ends the program, so a failure to set one changes little.
    let _ = ctrlc::set_handler(move || {
        if seen.request() {
            std::process::exit(130);
        }
        notice.into_iter().for_each(err);
    });
    interrupt
}
