//! The terminal: flags in, recipes run, results shown. The only place that prints.

mod args;
mod commands;
mod flags;
pub mod reference;
mod terminal;

use std::process::ExitCode;

use clap::Parser;

use crate::error::Error;
use crate::recipes::report::Interrupt;
use args::Cli;

/// Runs the command line of this process: 0 done, 1 failed, 2 not understood.
pub fn main() -> ExitCode {
    std::panic::set_hook(Box::new(|info| {
        eprintln!("error: gpt met a defect of its own: {info}\n\nhint: saved states are intact; please report this");
    }));
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    let run = std::panic::catch_unwind(|| commands::run(cli, &interrupt()));
    match run {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            show(&error);
            ExitCode::from(error.exit_code())
        }
        Err(_) => ExitCode::from(1),
    }
}

fn show(error: &Error) {
    eprintln!("error: {error}");
    if let Some(hint) = error.hint() {
        eprintln!("\nhint: {hint}");
    }
}

/// Ctrl-C asks to stop; a second one leaves at once, which loses nothing since saved states appear by rename only.
fn interrupt() -> Interrupt {
    let interrupt = Interrupt::default();
    let seen = interrupt.clone();
    // Without a handler Ctrl-C still ends the program, so a failure to set one changes little.
    let _ = ctrlc::set_handler(move || {
        if seen.request() {
            std::process::exit(130);
        }
        eprintln!("\nstopping after this step (once more to leave at once)");
    });
    interrupt
}
