-- Take room for a call of a tenant, or give it back; see `rooms`. ARGV: what is asked. → ok | no_room <full or share> <kind>
local asked = cjson.decode(ARGV[1])
local none = without_place(asked, hear(asked))
if none then return {'no_room', unpack(none)} end
take_place(asked)
return {'ok'}
