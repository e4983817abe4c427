import { type Command, Option } from 'commander';

/** One flag of a command that has a table of them. */
export interface FlagRow {
  /** Name without dashes. */
  readonly flag: string;
  /** One letter, without its dash. */
  readonly short?: string;
  readonly kind: 'switch' | 'value' | 'list';
  /** Word for the value in the help. */
  readonly value?: string;
  readonly group: string;
  readonly about: string;
}

/** Adds the flags of a table to a command. */
export function addTable(command: Command, rows: readonly FlagRow[]): void {
  for (const { flag, short, kind, value, group, about } of rows) {
    const names = `${short === undefined ? '' : `-${short}, `}--${flag}`;
    const option = new Option(`${names}${kind === 'switch' ? '' : ` <${value ?? 'value'}>`}`, about).helpGroup(group);
    command.addOption(kind === 'list' ? option.argParser(addTo) : option);
  }
}

/** What a command line says of the flags of a table, by their names; a switch is the text `true`. */
export function readTable(
  rows: readonly FlagRow[],
  values: Readonly<Record<string, unknown>>,
): Readonly<Record<string, string | readonly string[]>> {
  const flags: Record<string, string | readonly string[]> = {};
  for (const { flag } of rows) {
    const value = values[camelCase(flag)];
    if (value !== undefined) flags[flag] = Array.isArray(value) ? value.map(String) : String(value);
  }
  return flags;
}

/** Collects what a repeatable flag was given. */
export function addTo(text: string, all: readonly string[] | undefined): readonly string[] {
  return [...(all ?? []), text];
}

/** The name under which commander hands out a flag. */
export function camelCase(flag: string): string {
  return flag.replaceAll(/-(.)/g, (_, letter: string) => letter.toUpperCase());
}
