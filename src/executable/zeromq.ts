// Takes the place of zeromq's own way to its library when the executable is built.
import { loadAddon } from './addon.ts';
import { readPart } from './parts.ts';

export const addon = loadAddon({ name: 'ZMQ', bytes: readPart('zeromq') });
