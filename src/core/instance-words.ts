import { InstanceState, Role } from '../../gen/baton/v1/instance_pb.ts';

const ROLES: Readonly<Record<number, string>> = {
  [Role.PREFILL]: 'prefill',
  [Role.DECODE]: 'decode',
  [Role.BOTH]: 'both',
};

const STATES: Readonly<Record<number, string>> = {
  [InstanceState.STARTING]: 'starting',
  [InstanceState.READY]: 'ready',
  [InstanceState.SUSPECT]: 'suspect',
  [InstanceState.DRAINING]: 'draining',
  [InstanceState.GONE]: 'gone',
};

/** A role as the word that logs, metrics and the configuration use; `unspecified` for one that is not known. */
export function roleWord(role: Role): string {
  return ROLES[role] ?? 'unspecified';
}

/** A state as the word that logs and metrics use; `unspecified` for one that is not known. */
export function stateWord(state: InstanceState): string {
  return STATES[state] ?? 'unspecified';
}
