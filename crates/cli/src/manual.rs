//! `wholemem completions` and `man`: scripts for shells and manual pages, from the definition of the command line.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use clap::CommandFactory;
use clap_complete::Shell;
use clap_mangen::Man;
use wholemem_command::terminal;

use crate::cli::{Cli, CompletedShell, CompletionsArgs, ManArgs};

const PROGRAM: &str = "wholemem";

pub(crate) fn completions(args: &CompletionsArgs) -> Result<()> {
    let shell = match args.shell {
        CompletedShell::Bash => Shell::Bash,
        CompletedShell::Zsh => Shell::Zsh,
        CompletedShell::Fish => Shell::Fish,
    };
    // The generators do not skip internal commands.
    let root = Cli::command();
    let visible = root.get_subcommands().filter(|below| !below.is_hide_set()).cloned();
    let mut command = clap::Command::new(PROGRAM).version(env!("CARGO_PKG_VERSION")).subcommands(visible);
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, PROGRAM, &mut script);
    terminal::print(&String::from_utf8(script)?)
}

pub(crate) fn man(args: &ManArgs) -> Result<()> {
    let mut root = Cli::command();
    // Names and usage lines of commands contain those of the commands above them only after this.
    root.build();
    if let Some(folder) = &args.dir {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        return write_pages(&root, PROGRAM, folder);
    }
    let (mut command, mut name) = (&root, PROGRAM.to_owned());
    for part in &args.command {
        let found = command.find_subcommand(part).filter(|found| !found.is_hide_set());
        command = found.ok_or_else(|| anyhow!("there is no command `{name} {part}`"))?;
        name = format!("{name}-{part}");
    }
    terminal::print(&page(command, &name)?)
}

/// Writes the manual pages of a command and of the commands below it.
fn write_pages(command: &clap::Command, name: &str, folder: &Path) -> Result<()> {
    let path = folder.join(format!("{name}.1"));
    std::fs::write(&path, page(command, name)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    let visible =
        command.get_subcommands().filter(|below| !below.is_hide_set() && below.get_name() != "help");
    visible
        .into_iter()
        .try_for_each(|below| write_pages(below, &format!("{name}-{}", below.get_name()), folder))
}

/// Returns the manual page of a command in the format of man.
fn page(command: &clap::Command, name: &str) -> Result<String> {
    let mut text = Vec::new();
    let command = command.clone().name(name.to_owned()).version(env!("CARGO_PKG_VERSION"));
    Man::new(command).title(name.to_uppercase()).render(&mut text)?;
    Ok(String::from_utf8(text)?)
}
