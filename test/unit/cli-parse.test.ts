import { describe, expect, test } from 'vitest';
import { tidyArguments } from '../../src/cli/arguments.ts';
import { parseCommand } from '../../src/cli/parse-command.ts';
import { FLAGS } from '../../src/config/flags.ts';
import { LAUNCH_FLAGS } from '../../src/launch/flags.ts';

function parse(line: string) {
  return parseCommand(
    line.split(' ').filter((word) => word !== ''),
    () => 'baton 1.2.3 (node v0)',
  );
}

describe('launch', () => {
  test('words for the engines are not flags of baton, whatever they look like', () => {
    expect(parse('launch --prefill 3 --sim --engine-arg --port --engine-arg=--host --baton-arg --prefill')).toEqual({
      kind: 'launch',
      flags: { prefill: '3', sim: 'true', 'engine-arg': ['--port', '--host'], 'baton-arg': ['--prefill'] },
    });
    expect(parse('launch')).toEqual({ kind: 'launch', flags: {} });
  });

  test('every flag is understood', () => {
    for (const { flag, kind } of LAUNCH_FLAGS) {
      const value = kind === 'switch' ? 'true' : kind === 'list' ? ['x'] : 'x';
      expect(parse(`launch --${flag}${kind === 'switch' ? '' : ' x'}`), flag).toEqual({
        kind: 'launch',
        flags: { [flag]: value },
      });
    }
  });

  test('an unknown flag is a mistake', () => {
    expect(parse('launch --modle x')).toEqual({ kind: 'usage', message: expect.stringContaining('--model') });
  });
});

function flags(line: string): unknown {
  const command = parse(line);
  return command.kind === 'serve' ? command.flags : command;
}

describe('serve', () => {
  test('a list with spaces ends at the next flag', () => {
    expect(flags('serve --prefiller-host a b --prefiller-port 1 2 --sim')).toEqual({
      'prefiller-host': ['a', 'b'],
      'prefiller-port': ['1', '2'],
      sim: 'true',
    });
  });

  test('singular, plural and = are one flag', () => {
    expect(flags('serve --decoder-hosts=a --decoder-ports 1')).toEqual({
      'decoder-host': ['a'],
      'decoder-port': ['1'],
    });
    expect(flags('serve --decoder-host a,b --decoder-port=1')).toEqual({
      'decoder-host': ['a,b'],
      'decoder-port': ['1'],
    });
    expect(flags('serve --rpc-port=off --port 0')).toEqual({ 'rpc-port': 'off', port: '0' });
  });

  test('a repeated example flag replaces, in either spelling', () => {
    expect(
      flags('serve --prefiller-host a b --port 1 --prefiller-hosts c --prefiller-port 1 --prefiller-port=2'),
    ).toEqual({
      port: '1',
      'prefiller-host': ['c'],
      'prefiller-port': ['2'],
    });
  });

  test('a repeated --prefill or --decode adds, a repeated single value replaces', () => {
    expect(flags('serve --prefill http://a --decode http://d --prefill http://b http://c --port 1 --port 2')).toEqual({
      prefill: ['http://a', 'http://b', 'http://c'],
      decode: ['http://d'],
      port: '2',
    });
  });

  test('every flag is understood', () => {
    for (const { name, alias, kind } of FLAGS) {
      const value = kind === 'switch' ? 'true' : kind === 'value' ? 'x' : ['x'];
      for (const spelling of alias === undefined ? [name] : [name, alias]) {
        expect(flags(`serve --${spelling}${kind === 'switch' ? '' : ' x'}`), spelling).toEqual({ [name]: value });
      }
    }
  });

  test('a role command is serve with that role', () => {
    expect(flags('kvstore --rpc-port 1')).toEqual({ roles: 'kvstore', 'rpc-port': '1' });
    expect(flags('facade --router-url http://r')).toEqual({ roles: 'facade', 'router-url': 'http://r' });
    expect(parse('router --roles facade')).toEqual({ kind: 'usage', message: expect.stringContaining("'--roles'") });
  });
});

describe('sim', () => {
  test('takes the options of a simulated engine', () => {
    expect(parse('sim --role prefill --port 0 --model a --model b=c --bidirectional')).toMatchObject({
      kind: 'sim',
      options: { role: 'prefill', port: 0, models: [{ id: 'a' }, { id: 'b', root: 'c' }], bidirectional: true },
    });
    expect(parse('sim')).toMatchObject({ kind: 'sim', options: { role: 'both' } });
  });

  test('a bad value names its flag', () => {
    expect(parse('sim --port x')).toEqual({ kind: 'usage', message: expect.stringContaining('--port') });
    expect(parse('sim --role x')).toEqual({ kind: 'usage', message: expect.stringContaining('--role') });
    expect(parse('sim --prefill http://a')).toEqual({ kind: 'usage', message: expect.stringContaining("'--prefill'") });
  });
});

describe('mistakes are one sentence', () => {
  test.each([
    ['serve --prot 1', "unknown option '--prot'; did you mean --port?"],
    ['serve --store-valkey-url=x', "unknown option '--store-valkey-url'; did you mean --valkey-url?"],
    ['kvstore --valkey-prefix x', "unknown option '--valkey-prefix'; set store.valkey.prefix in the file (--config)"],
    ['serve --store-max-bytes 1', "unknown option '--store-max-bytes'; set store.max_bytes in the file (--config)"],
    ['sim --valkey-prefix x', "unknown option '--valkey-prefix'; baton sim --help lists what there is"],
    ['kvstore --rpc-prt 1', "unknown option '--rpc-prt'; did you mean --rpc-port?"],
    ['pool list --jsn', "unknown option '--jsn'; did you mean --json?"],
    ['pool', 'baton pool needs a command: list, add, drain, resume, remove, watch; baton pool --help tells more'],
    ['pool lst', "unknown command 'lst'; did you mean list?"],
    ['pool frob', "unknown command 'frob'; baton pool --help lists what there is"],
    ['serve --port', '--port needs a value, --port <port>'],
    ['serve --host --port 8000', '--host needs a value, --host <addr>'],
    ['serve --prefiller-host --prefiller-port 1', '--prefiller-host needs a value, --prefiller-host <host>'],
    ['serve --prefill', '--prefill needs a value, --prefill <url>'],
    ['serve x', 'unexpected argument x'],
    ['serve --host=a b', 'unexpected argument b'],
    ['srve', "unknown command 'srve'; did you mean serve?"],
    ['help srve', "unknown command 'srve'; did you mean serve?"],
    ['frob', "unknown command 'frob'; baton --help lists what there is"],
    ['--port 8000', '--port needs a command before it: baton serve --port ...'],
    ['--port=8000', '--port needs a command before it: baton serve --port ...'],
    ['check-config', "missing required argument 'file'"],
  ])('%s', (line, message) => {
    expect(parse(line)).toEqual({ kind: 'usage', message });
  });
});

describe('help and version', () => {
  test.each(['', '--help', '-h', 'help'])('"%s" lists the commands', (line) => {
    const command = parse(line);
    expect(command.kind).toBe('print');
    for (const word of ['serve', 'facade', 'router', 'kvstore', 'registry', 'sim', 'check-config']) {
      expect(command).toMatchObject({ text: expect.stringContaining(`\n  ${word} `) });
    }
  });

  test('the help of serve has every flag in its group and fits a screen', () => {
    const command = parse('serve --help');
    const text = command.kind === 'print' ? command.text : '';
    for (const { name, group, about } of FLAGS) {
      expect(text).toContain(`--${name}`);
      expect(text).toContain(`\n${group}\n`);
      expect(text).toContain(about);
    }
    for (const line of text.split('\n')) expect(line.length, line).toBeLessThanOrEqual(120);
    expect(parse('help serve')).toEqual(command);
  });

  test('the help of a role is short', () => {
    const command = parse('kvstore --help');
    expect(command.kind === 'print' && command.text.split('\n').length).toBeLessThan(10);
  });

  test('version', () => {
    expect(parse('--version')).toEqual({ kind: 'print', text: 'baton 1.2.3 (node v0)\n' });
  });
});

test('words after -- are left alone', () => {
  expect(tidyArguments(['serve', '--decoder-host', 'a', '--', '--decoder-host', 'b'])).toEqual({
    kind: 'ok',
    args: ['serve', '--decoder-host', 'a', '--', '--decoder-host', 'b'],
  });
});
