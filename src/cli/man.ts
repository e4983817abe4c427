import type { Command, Help } from 'commander';

/** The manual page baton(1) in roff, with what `--help` prints for every command. */
export function manPage(program: Command, version: string): string {
  const help = program.createHelp();
  const lines = [
    `.TH BATON 1 "" "baton ${roff(version)}" "User Commands"`,
    '.SH NAME',
    `baton \\- ${roff('control plane for disaggregated LLM serving')}`,
    '.SH SYNOPSIS',
    ...program.commands.flatMap((command, index) => [
      index === 0 ? '' : '.br',
      `.B baton ${roff(command.name())}`,
      usage(command),
    ]),
    '.SH DESCRIPTION',
    roff(program.description()),
    ...afterHelp(program),
    ...options(program, help),
    '.SH COMMANDS',
    ...help.visibleCommands(program).flatMap((command) => section(command, help, `baton ${command.name()}`)),
    '.SH EXIT STATUS',
    '.TP',
    '.B 0',
    'done, or stopped by a signal after what ran had ended',
    '.TP',
    '.B 1',
    'baton could not start, or what was asked for was refused',
    '.TP',
    '.B 2',
    'a mistake in the command line or in the settings',
  ];
  return `${lines.filter((line) => line !== '').join('\n')}\n`;
}

function usage(command: Command): string {
  return roff(command.usage());
}

function section(command: Command, help: Help, title: string): readonly string[] {
  return [
    `.SS "${roff(title)} ${usage(command)}"`,
    roff(command.description() || command.summary()),
    ...options(command, help),
    ...afterHelp(command),
    ...command.commands.flatMap((each) => section(each, help, `${title} ${each.name()}`)),
  ];
}

/** The flags that its help shows, under the headings that they have there. */
function options(command: Command, help: Help): readonly string[] {
  const lines: string[] = [];
  let heading = '';
  for (const option of help.visibleOptions(command)) {
    const { helpGroupHeading = '' } = option;
    if (helpGroupHeading !== heading && helpGroupHeading !== '') lines.push('.PP', `.I ${roff(helpGroupHeading)}`);
    heading = helpGroupHeading;
    lines.push('.TP', `.B ${roff(help.optionTerm(option))}`, roff(help.optionDescription(option)));
  }
  return lines;
}

/** The text that its help ends with, each line by itself. */
function afterHelp(command: Command): readonly string[] {
  let text = '';
  const writeOut = (more: string) => {
    text += more;
  };
  command.configureOutput({ writeOut }).outputHelp();
  const after = text.slice(command.helpInformation().length);
  const lines = after.split('\n').filter((line) => line.trim() !== '');
  return lines.length === 0 ? [] : ['.PP', '.nf', ...lines.map(roff), '.fi'];
}

/** Text as roff takes it: no line starts with a request, and a hyphen is one that can be searched for. */
function roff(text: string): string {
  return text
    .replaceAll('\\', '\\e')
    .replaceAll('-', '\\-')
    .replaceAll('"', '\\(dq')
    .replaceAll(/^([.'])/gm, '\\&$1');
}
