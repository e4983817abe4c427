import { Argument, type Command } from 'commander';

const SHELLS = ['bash', 'zsh', 'fish'] as const;

/** What the commands and their flags are written down as: a shell's completions, or a page for man. */
export type DescribeForm = (typeof SHELLS)[number] | 'man';

const COMPLETION_HELP = `
To have them in each new shell:
  baton completion bash > ~/.local/share/bash-completion/completions/baton
  baton completion zsh > a folder of $fpath, as _baton
  baton completion fish > ~/.config/fish/completions/baton.fish
`;

/** Adds the commands that tell other programs of all commands. */
export function addDescribeCommands(program: Command, run: (form: DescribeForm) => void): void {
  program
    .command('completion')
    .summary('print completions for a shell')
    .description('Prints a script with which a shell completes commands, flags and names.')
    .addArgument(new Argument('<shell>', 'whose completions').choices(SHELLS))
    .addHelpText('after', COMPLETION_HELP)
    .action((shell: DescribeForm) => run(shell));
  program
    .command('man')
    .summary('print the manual page')
    .description('Prints the manual page baton(1), to be shown by man -l or kept as baton.1.')
    .action(() => run('man'));
}
