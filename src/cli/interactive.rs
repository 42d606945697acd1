//! `gpt sample -i`: a start is typed, the model goes on; settings change in between.

use clap::Parser;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::args::{Cli, Command};
use super::commands::sample_config;
use super::terminal::{Terminal, err};
use super::{show, show_error};
use crate::error::{Error, Result};
use crate::recipes::report::Interrupt;
use crate::recipes::sample::prompts::Prompt;
use crate::recipes::sample::settings::Generation;
use crate::recipes::sample::{SampleConfig, Session};

const HELP: &str = "a text        the model goes on with it (\\n is a line break)
nothing       it goes on where it stopped
/set          the settings that differ from the start
/set NAME V   sets one by the name of its flag: /set temperature 0.5
/quit         or Ctrl-D; Ctrl-C stops the text";

/// The flags that can be set between texts: what was loaded stays.
const SETTABLE: [&str; 17] = [
    "temperature",
    "top-k",
    "top-p",
    "min-p",
    "repetition-penalty",
    "repetition-window",
    "presence-penalty",
    "frequency-penalty",
    "seed",
    "max-tokens",
    "min-tokens",
    "logit-bias",
    "stop",
    "stop-token",
    "hide",
    "kv-window",
    "kv-sinks",
];

/// Reads lines until there are no more.
pub fn run(start: SampleConfig, interrupt: &Interrupt) -> Result<()> {
    let mut session = Session::open(&start, &mut Terminal::new())?;
    let mut config = start.clone();
    let failed = |e: ReadlineError| Error::failed(format!("reading a line: {e}"));
    let mut editor = DefaultEditor::new().map_err(failed)?;
    let (mut set, mut last) = (Vec::new(), String::new());
    err("type a start, or /help");
    loop {
        let line = match editor.readline("> ") {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => continue,
            Err(ReadlineError::Eof) => return Ok(()),
            Err(e) => return Err(failed(e)),
        };
        // A history that cannot be kept is no reason to stop.
        let _ = editor.add_history_entry(&line);
        let prompt = match line.trim() {
            "/quit" | "/exit" => return Ok(()),
            "/help" => {
                err(HELP);
                continue;
            }
            command if command.starts_with('/') => {
                if let Err(error) = command_line(command, &start, &mut config, &mut set) {
                    show_error(&error);
                }
                continue;
            }
            "" => last.clone(),
            _ => line.replace("\\n", "\n"),
        };
        interrupt.clear();
        config.prompts = vec![Prompt::of(&prompt)];
        match session.run(&config, &mut Terminal::texts(), interrupt) {
            Ok(summary) => {
                show::sample(&summary);
                last = prompt + &summary.rows[0].text;
            }
            Err(error) => show_error(&error),
        }
        interrupt.clear();
    }
}

/// `/set`, or what is not known.
fn command_line(
    line: &str,
    start: &SampleConfig,
    config: &mut SampleConfig,
    set: &mut Vec<(String, String)>,
) -> Result<()> {
    let mut words = line.splitn(3, ' ').map(str::trim);
    if words.next() != Some("/set") {
        return Err(Error::usage(format!("unknown command `{line}`")).with_hint("try /help"));
    }
    let (Some(name), value) = (words.next().filter(|name| !name.is_empty()), words.next()) else {
        set.iter().for_each(|(name, value)| err(&format!("{name} {value}")));
        return Ok(());
    };
    let name = name.trim_start_matches("--").replace('_', "-");
    if !SETTABLE.contains(&name.as_str()) {
        let known = format!("these can be set here: {}", SETTABLE.join(", "));
        return Err(Error::usage(format!("`{name}` cannot be set here")).with_hint(known));
    }
    let mut next = set.clone();
    next.retain(|(other, _)| *other != name);
    next.extend(value.map(|value| (name, value.to_owned())));
    // Through the same parser as the command line, so that names, ranges and messages are the same.
    let flags = next.iter().flat_map(|(name, value)| {
        let values: Vec<&str> = if name == "hide" { value.split(' ').collect() } else { vec![value] };
        std::iter::once(format!("--{name}")).chain(values.into_iter().map(str::to_owned))
    });
    let words = ["gpt".to_owned(), "sample".to_owned()].into_iter().chain(flags);
    let cli = Cli::try_parse_from(words).map_err(|e| {
        let message = e.to_string();
        let first = message.lines().next().unwrap_or_default();
        Error::usage(first.trim_start_matches("error: ").to_owned())
    })?;
    let Command::Sample(args) = cli.command else { unreachable!("the words say sample") };
    let changed = sample_config(*args, config.family)?;
    Generation::default().sampling(&changed.sampling).validate()?;
    let is_set = |name: &str| next.iter().any(|(other, _)| other == name);
    config.sampling = changed.sampling.or(&start.sampling);
    config.max_tokens = if is_set("max-tokens") { changed.max_tokens } else { start.max_tokens };
    config.min_tokens = if is_set("min-tokens") { changed.min_tokens } else { start.min_tokens };
    config.marks.stop = if is_set("stop") { changed.marks.stop } else { start.marks.stop.clone() };
    config.marks.hide = if is_set("hide") { changed.marks.hide } else { start.marks.hide.clone() };
    config.stop_tokens = if is_set("stop-token") { changed.stop_tokens } else { start.stop_tokens.clone() };
    config.logit_bias = if is_set("logit-bias") { changed.logit_bias } else { start.logit_bias.clone() };
    config.cache.window = if is_set("kv-window") { changed.cache.window } else { start.cache.window };
    config.cache.sinks = if is_set("kv-sinks") { changed.cache.sinks } else { start.cache.sinks };
    *set = next;
    Ok(())
}
