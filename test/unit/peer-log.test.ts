import { Code, ConnectError } from '@connectrpc/connect';
import { expect, test } from 'vitest';
import { createLogger } from '../../src/obs/log.ts';
import { PeerLog, type PeerRole } from '../../src/roles/peer-log.ts';

function setUp(role: PeerRole) {
  const lines: { readonly level: string; readonly msg: string; readonly cause?: string }[] = [];
  const destination = { write: (line: string) => lines.push(JSON.parse(line)) };
  const clock = { ms: 0 };
  const peer = new PeerLog(createLogger({ level: 'info', format: 'json', destination }), role, () => clock.ms);
  const told = () => lines.splice(0).map(({ level, msg, cause = '' }) => `${level}: ${msg.split(/[:;]/)[0]}: ${cause}`);
  return { peer, clock, told };
}

const refused = (cause: string) => new ConnectError(cause, Code.Unauthenticated);
const lost = new ConnectError('the connection was lost', Code.Unavailable);
const absent = new ConnectError('connect', Code.Unavailable, undefined, undefined, errorOf('ECONNREFUSED'));

function errorOf(code: string): Error {
  return Object.assign(new Error(code), { code });
}

test('what is wrong is told once, whatever its calls say meanwhile, and so is its end', () => {
  const { peer, told } = setUp('router');
  peer.note(undefined);
  expect(told()).toEqual([]);
  for (const error of [absent, lost, absent]) peer.note(error);
  expect(told()).toEqual(['warn: the router does not answer: nothing listens there']);
  for (const error of [undefined, undefined]) peer.note(error);
  expect(told()).toEqual(['info: the router answers again: ']);
  peer.note(lost);
  expect(told()).toEqual(['warn: the router does not answer: the connection was lost']);
});

test('each cause of a refusal is told, and one that was away and then refuses', () => {
  const { peer, told } = setUp('registry');
  for (const error of [lost, refused('a'), refused('a'), lost, refused('a'), refused('b')]) peer.note(error);
  expect(told()).toEqual([
    'warn: the registry does not answer: the connection was lost',
    'error: the registry refuses this process: a',
    'error: the registry refuses this process: b',
  ]);
  peer.note(undefined);
  expect(told()).toEqual(['info: the registry answers again: ']);
});

test('a store that refuses some calls and not others is well a minute after the last refusal', () => {
  const { peer, clock, told } = setUp('store');
  for (let turn = 0; turn < 4; turn++) {
    peer.note(refused('a'));
    clock.ms += 59_999;
    peer.note(undefined);
  }
  expect(told()).toEqual(['error: the store refuses this process: a']);
  clock.ms += 1;
  peer.note(undefined);
  expect(told()).toEqual(['info: the store answers again: ']);
});
