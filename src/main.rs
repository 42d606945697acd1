//! The `gpt` program: everything is in the library.

fn main() -> std::process::ExitCode {
    gpt::cli::main()
}
