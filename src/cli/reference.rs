//! docs/reference/cli.md, made from the clap tree. A test holds the file against this.

use clap::{Arg, Command, CommandFactory};

use super::args::Cli;

/// The reference of all commands in Markdown.
pub fn markdown() -> String {
    let mut root = Cli::command();
    root.build();
    let mut text =
        "# Command line reference\n\nMade by `gpt reference`; do not edit. `gpt COMMAND --help` shows the same.\n"
            .to_owned();
    section(&root, "gpt", &mut text);
    text
}

fn section(command: &Command, path: &str, text: &mut String) {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    *text += &format!("\n## {path}\n\n{about}.\n");
    let shown = |arg: &&Arg| !arg.is_hide_set() && !["help", "version"].contains(&arg.get_id().as_str());
    let global = |arg: &&Arg| path == "gpt" || !arg.is_global_set();
    let arguments: Vec<&Arg> = command.get_arguments().filter(shown).filter(global).collect();
    if !arguments.is_empty() {
        *text += "\n| argument | default | meaning |\n| --- | --- | --- |\n";
        arguments.into_iter().for_each(|arg| *text += &row(arg));
    }
    for sub in command.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help") {
        section(sub, &format!("{path} {}", sub.get_name()), text);
    }
}

fn row(arg: &Arg) -> String {
    let value = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string).unwrap_or_default();
    let takes = arg.get_action().takes_values();
    let name = match (arg.get_long(), arg.get_short()) {
        (Some(long), short) => {
            let short = short.map_or(String::new(), |s| format!("-{s}, "));
            if takes { format!("{short}--{long} {value}") } else { format!("{short}--{long}") }
        }
        (None, _) => format!("[{value}]"),
    };
    let default: Vec<String> = arg.get_default_values().iter().map(|v| v.to_string_lossy().into_owned()).collect();
    let default = if takes { default.join(" ") } else { String::new() };
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default().replace('|', "\\|");
    format!("| `{name}` | {default} | {help} |\n")
}
