"""What a tar holds: headers, the index of its members, samples as they stream by."""
