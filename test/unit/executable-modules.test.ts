import { expect, test } from 'vitest';
import { type Require, requireFrom } from '../../src/executable/modules.ts';

type Module = (load: Require, exports: Record<string, unknown>) => void;

/** A program of two scripts, and which of them have been read. */
function program() {
  const read: string[] = [];
  const scripts: (readonly [string, Record<string, Module>])[] = [
    [
      'first',
      {
        './main.js': (load, exports) => {
          exports['value'] = Object.entries(load('./other.js'));
          exports['late'] = () => load('./late.js');
        },
        './other.js': (_load, exports) => {
          exports['one'] = 1;
        },
      },
    ],
    [
      'second',
      {
        './late.js': (load, exports) => {
          exports['of'] = load('./other.js');
        },
      },
    ],
  ];
  const load = requireFrom(() => {
    const [name = '', modules] = scripts.shift() ?? [];
    read.push(name);
    return modules;
  });
  return { load, read };
}

test('a script is read when one of its modules is asked for, and a module runs once', () => {
  const { load, read } = program();
  const main = Object.entries(load('./main.js'));
  expect(main[0]).toEqual(['value', [['one', 1]]]);
  expect(read).toEqual(['first']);
  const late = load('./late.js');
  expect(read).toEqual(['first', 'second']);
  expect(Object.values(late)[0]).toBe(load('./other.js'));
  expect(load('./late.js')).toBe(late);
  expect(read).toEqual(['first', 'second']);
});

test("Node's modules are found by their names; what is in no script is told as Node tells it", () => {
  const { load } = program();
  expect(load('node:path')).toBe(process.getBuiltinModule('path'));
  for (const name of ['./none.js', 'nothing'])
    expect(() => load(name)).toThrow(
      expect.objectContaining({ code: 'MODULE_NOT_FOUND', message: `Cannot find module '${name}'` }),
    );
});
