// Runs the scripts of the program until baton has answered a first request, and writes down what V8 has compiled of each
// by then: the executable starts with it. Usage: compiled-code.mjs <first module> (<script> <output>)...
import { spawnSync } from 'node:child_process';
import { readFileSync, writeFileSync } from 'node:fs';
import { basename } from 'node:path';
import v8 from 'node:v8';
import { Script } from 'node:vm';
import { requireFrom } from '../src/executable/modules.ts';

const [, , first, ...files] = process.argv;
// V8 takes compiled code only under the flags that it was written down under: those of a start, before baton sets its own.
v8.setFlagsFromString = () => undefined;
const scripts = [];
for (let at = 0; at < files.length; at += 2) {
  const [file, output] = files.slice(at, at + 2);
  scripts.push({ file, output, script: new Script(readFileSync(file, 'latin1'), { filename: basename(file) }) });
}
const ports = ['--port', '--rpc-port', '--admin-port'].flatMap((flag) => [flag, '0']);
process.argv = [process.argv[0], first, 'serve', '--sim', '--host', '127.0.0.1', '--log-format', 'json', ...ports];

const TAKES_IT = `const [, file, code] = process.argv;
const [source, cachedData] = [fs.readFileSync(file, 'latin1'), fs.readFileSync(code)];
const { cachedDataRejected } = new vm.Script(source, { filename: path.basename(file), cachedData });
fs.writeSync(1, cachedDataRejected ? 'refused' : 'taken');`;

const up = Promise.withResolvers();
process.stdout.write = () => true;
process.stderr.write = (text) => {
  const facade = /"facade":"([^"]+)".*"baton is up"/.exec(text)?.[1];
  if (facade !== undefined) up.resolve(facade);
  return true;
};
process.on('exit', (code) => {
  if (code !== 0) process._rawDebug('the program ended before it was up');
});

const left = [...scripts];
requireFrom(() => left.shift()?.script.runInThisContext())(first);
const reply = await fetch(`http://${await up.promise}/health`);
if (!reply.ok) throw new Error(`the program is not healthy: ${reply.status}`);
await reply.arrayBuffer();
for (const { file, output, script } of scripts) {
  writeFileSync(output, script.createCachedData());
  const again = spawnSync(process.execPath, [...process.execArgv, '-e', TAKES_IT, file, output], { encoding: 'utf8' });
  if (again.stdout !== 'taken') throw new Error(`V8 refuses the compiled code: ${again.stdout}${again.stderr}`);
}
process.exit(0);
